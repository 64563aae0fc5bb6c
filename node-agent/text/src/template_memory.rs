//! How much memory a template may take. Templates come with models that nobody trusts, and a few lines of one double a text until no memory
//! is left. minijinja counts steps and not bytes, and nothing but the allocator sees all of these.
//!
//! So a program that renders has [`TemplateAllocator`] for its allocator. It counts what the thread that renders takes, and ends the program
//! beyond [`MOST_BYTES`]: an allocator may neither fail there nor unwind. The machine stays usable, and the reason is the program's last word.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write as _;

/// More than twice what the largest conversation takes that a gateway lets in, in the most wasteful form.
const MOST_BYTES: isize = 512 << 20;

thread_local! {
    /// Bytes that a template may still take; `None` while none is rendered. It needs no memory itself.
    static LEFT: Cell<Option<isize>> = const { Cell::new(None) };
}

/// The system's allocator, with a limit for templates.
pub struct TemplateAllocator;

/// Counts what `render` takes.
pub fn limited<T>(render: impl FnOnce() -> T) -> T {
    struct Over;
    impl Drop for Over {
        fn drop(&mut self) {
            LEFT.set(None);
        }
    }
    LEFT.set(Some(MOST_BYTES));
    let _over = Over;
    render()
}

/// `bytes` more, or less.
fn count(bytes: isize) {
    if let Some(left) = LEFT.get() {
        let left = left.saturating_sub(bytes);
        if left < 0 {
            end();
        }
        LEFT.set(Some(left));
    }
}

#[cold]
fn end() -> ! {
    LEFT.set(None);
    let why = b"error: the model's chat template takes more than 512 MiB of memory: use another file of this model\n";
    let _ = std::io::stderr().write_all(why);
    // At once: neither what runs at an orderly end nor a core, with what people have written in it.
    // SAFETY: it takes nothing and does not come back.
    unsafe { libc::_exit(1) }
}

// SAFETY: all memory is the system allocator's, which is asked and told exactly what this one is.
unsafe impl GlobalAlloc for TemplateAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as promised to this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as promised to this function.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as promised to this function.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: as promised to this function.
        unsafe { System.realloc(memory, layout, size) }
    }
}
