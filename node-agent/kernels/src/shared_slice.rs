//! A mutable slice that the pieces of one job write to at once, each its own part. Decides nothing; the
//! callers' pieces must not overlap, which is the contract of its one unsafe function.

use std::marker::PhantomData;
use std::ops::Range;

/// A slice of which several threads may each borrow disjoint parts.
pub(super) struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out `&mut T`s to disjoint parts only (the contract of `part`), so sharing it between
// threads moves exclusive access to those parts between threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        SharedSlice {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            slice: PhantomData,
        }
    }

    /// The part at `range`.
    ///
    /// # Safety
    /// No part that overlaps `range` may be in use while the returned one is.
    ///
    /// # Panics
    /// When `range` reaches beyond the slice.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds of the borrowed slice (checked); not aliased (the caller's promise).
        unsafe {
            std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start)
        }
    }
}
