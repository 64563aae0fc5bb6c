//! The system's page cache: what it keeps of a file.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;

/// Drops the whole pages of `range` from the page cache, as far as no process has them mapped. Where the system has no such call
/// (macOS), nothing happens.
///
/// # Errors
/// The error of the system call.
pub fn drop_pages(file: &File, range: Range<u64>) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    if let Some(length) = NonZeroU64::new(range.end.saturating_sub(range.start)) {
        let advice = rustix::fs::Advice::DontNeed;
        rustix::fs::fadvise(file, range.start, Some(length), advice)?;
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = (file, range);
    Ok(())
}

/// Has the system begin to read the pages of `range` into the page cache, and no others. Where it has no such call (macOS), nothing happens.
///
/// # Errors
/// The error of the system call.
pub fn expect_reads(file: &File, range: Range<u64>) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    for start in range.clone().step_by(EXPECTED_BYTES as usize) {
        let length = NonZeroU64::new(EXPECTED_BYTES.min(range.end - start));
        rustix::fs::fadvise(file, start, length, rustix::fs::Advice::WillNeed)?;
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = (file, range);
    Ok(())
}

/// Linux begins to read no more at a call than a disk is told to read ahead, which is usually this.
#[cfg(any(target_os = "linux", target_os = "android"))]
const EXPECTED_BYTES: u64 = 128 << 10;
