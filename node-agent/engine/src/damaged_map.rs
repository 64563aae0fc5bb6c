//! Handles pages of a mapped file that cannot be read, because the disk fails or somebody truncates the file. The system then sends
//! SIGBUS to the thread that touched them. Unhandled, it would end the process, and with it every session.
//!
//! Decides: such a page becomes zeros, and the map is marked as damaged; code that computes with the map checks this before it uses
//! its result. Refuses to touch any other SIGBUS: it goes to the handler that was there before.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// A watched range of addresses, until it is dropped.
#[derive(Debug)]
pub struct Watched {
    /// `None`: there are more maps than can be watched, or the system takes no handler.
    entry: Option<&'static Entry>,
}

#[derive(Debug)]
struct Entry {
    start: AtomicUsize,
    /// 0: free.
    end: AtomicUsize,
    damaged: AtomicBool,
}

/// A process opens a model or two, in up to some 60 files each.
const MAPS: usize = 256;
static ENTRIES: [Entry; MAPS] = [const {
    Entry {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        damaged: AtomicBool::new(false),
    }
}; MAPS];
/// Held while an entry is taken.
static TAKING: Mutex<()> = Mutex::new(());
/// The earlier SIGBUS handler.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();
static PAGE: AtomicUsize = AtomicUsize::new(0);

impl Watched {
    /// Watches `addresses`, which must stay mapped from a file, read-only, while the result lives.
    pub fn new(addresses: Range<usize>) -> Watched {
        if !install() {
            return Watched { entry: None };
        }
        let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let free = |entry: &&Entry| entry.end.load(Ordering::Acquire) == 0;
        let entry = ENTRIES.iter().find(free);
        if let Some(entry) = entry {
            entry.damaged.store(false, Ordering::Relaxed);
            entry.start.store(addresses.start, Ordering::Relaxed);
            entry.end.store(addresses.end, Ordering::Release);
        }
        Watched { entry }
    }

    /// Whether a page could not be read since the map was made.
    pub fn is_damaged(&self) -> bool {
        self.entry
            .is_some_and(|entry| entry.damaged.load(Ordering::Relaxed))
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(entry) = self.entry {
            entry.end.store(0, Ordering::Release);
        }
    }
}

/// Sets the handler, once; returns whether it is set.
fn install() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        PAGE.store(rustix::param::page_size(), Ordering::Relaxed);
        let mut before = MaybeUninit::<libc::sigaction>::uninit();
        // SAFETY: the structures are valid for the calls, which write `before` when they succeed; the handler does only what a
        // handler may: it reads atomics, maps a page, and calls the handler that was there before.
        unsafe {
            if libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr()) != 0 {
                return false;
            }
            let _ = BEFORE.set(before.assume_init());
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) == 0
        }
    })
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes a valid `siginfo_t`.
    let address = unsafe { (*info).si_addr() } as usize;
    let entry = ENTRIES.iter().find(|entry| {
        let end = entry.end.load(Ordering::Acquire);
        (entry.start.load(Ordering::Relaxed)..end).contains(&address)
    });
    if let Some(entry) = entry {
        let page = PAGE.load(Ordering::Relaxed);
        // SAFETY: replaces one unreadable page of a read-only map of a file by a page of zeros; maps are only read as plain bytes, and
        // every byte value is valid. mmap is a system call without state in this process.
        let zeros = unsafe {
            libc::mmap(
                (address / page * page) as *mut libc::c_void,
                page,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        if zeros != libc::MAP_FAILED {
            entry.damaged.store(true, Ordering::Relaxed);
            return;
        }
    }
    // SAFETY: calls the earlier handler as the system would have; or sets the default, which ends the process when the access is
    // repeated.
    unsafe {
        match BEFORE.get() {
            Some(before) if before.sa_sigaction > libc::SIG_IGN => {
                type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
                let handler: Handler = std::mem::transmute(before.sa_sigaction);
                handler(signal, info, context);
            }
            _ => {
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
            }
        }
    }
}
