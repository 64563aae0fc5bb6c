//! The signals by which people and machines ask a program to end in good order.

use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

pub struct StopSignals(Vec<Signal>);

impl StopSignals {
    /// From here on the signals do not end the process by themselves.
    pub fn install() -> io::Result<Self> {
        let mut signals = vec![
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        ];
        // `nohup` has a program ignore that its terminal is lost; to listen would undo that.
        let hangup = SignalKind::hangup();
        if !is_ignored(hangup)? {
            signals.push(signal(hangup)?);
        }
        Ok(Self(signals))
    }

    pub async fn received(&mut self) {
        poll_fn(|context| {
            let mut signals = self.0.iter_mut();
            match signals.any(|signal| signal.poll_recv(context).is_ready()) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }
}

/// Whether this process ignores `signal`, as whoever started it may want.
fn is_ignored(signal: SignalKind) -> io::Result<bool> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: nothing is set, and the structure is valid for the call, which writes it when it succeeds.
    let action = unsafe {
        if libc::sigaction(signal.as_raw_value(), ptr::null(), action.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        action.assume_init()
    };
    Ok(action.sa_sigaction == libc::SIG_IGN)
}
