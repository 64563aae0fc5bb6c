//! A link that takes time: what is written at one end is read at the other some milliseconds later, as many bytes a second as ever. A
//! relay between two sockets of this machine, since delaying packets (netem) takes a module that many kernels lack.
//!
//! Connecting takes no time, and neither is anything ever lost. A relay lasts as long as the test's process.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The address of a relay to `to`, over which every byte takes `delay`, in either direction.
///
/// # Errors
/// Where no port can be listened on.
pub fn slow_link(to: SocketAddr, delay: Duration) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for near in listener.incoming().flatten() {
            // Nobody listens there yet: the caller finds its connection closed.
            let Ok(far) = TcpStream::connect(to) else {
                continue;
            };
            let _ = near.set_nodelay(true).and(far.set_nodelay(true));
            if let (Ok(from_near), Ok(from_far)) = (near.try_clone(), far.try_clone()) {
                carry(from_near, far, delay);
                carry(from_far, near, delay);
            }
        }
    });
    Ok(address)
}

/// Hands on what comes from one end, and its end, each `delay` later.
fn carry(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    // However much is under way, the sender is never held up.
    let (sender, under_way) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let due = Instant::now() + delay;
            if sender.send((due, buffer[..count].to_vec())).is_err() {
                return;
            }
        }
        // Empty: the end.
        let _ = sender.send((Instant::now() + delay, Vec::new()));
    });
    thread::spawn(move || {
        for (due, bytes) in under_way {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if bytes.is_empty() || to.write_all(&bytes).is_err() {
                break;
            }
        }
        // It may have been closed.
        let _ = to.shutdown(Shutdown::Write);
    });
}
