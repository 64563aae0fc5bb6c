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
