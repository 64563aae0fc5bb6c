//! The system's page cache: what it keeps of a file.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;

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

/// Whether [`has_all`] tells the truth about `file`, which was opened at `path`. Linux tells only its owner, and those who may write to it; for others
/// every page seems to be there.
pub fn tells(file: &File, path: &Path) -> bool {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use std::os::unix::fs::MetadataExt as _;

        use rustix::fs::{Access, AtFlags, CWD, accessat};
        let owner = file.metadata().map(|metadata| metadata.uid());
        owner.is_ok_and(|owner| owner == rustix::process::geteuid().as_raw())
            || accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok()
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    {
        let _ = (file, path);
        false
    }
}

/// Whether the page cache has all pages of these bytes, which are a part of a file's map.
pub fn has_all(mapped: &[u8]) -> bool {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        let page = rustix::param::page_size();
        let skip = mapped.as_ptr() as usize % page;
        let bytes = mapped.len() + skip;
        let mut pages = vec![0_u8; bytes.div_ceil(page)];
        // SAFETY: these are whole pages of a map that lives until the end of this call, and there is a byte for each.
        let status = unsafe {
            let start = mapped.as_ptr().sub(skip).cast_mut().cast();
            libc::mincore(start, bytes, pages.as_mut_ptr())
        };
        status == 0 && pages.iter().all(|page| page & 1 == 1)
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    {
        let _ = mapped;
        false
    }
}

/// From now on, the system reads no pages around those that are read from `file`. Where it has no such call (macOS), nothing happens.
///
/// # Errors
/// The error of the system call.
pub fn expect_random_reads(file: &File) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random)?;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = file;
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
