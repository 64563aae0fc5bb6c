//! Addresses for programs that others must find before they listen.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// Below the ports that the system hands out itself (from 32768 on), and below those of Kubernetes' services (from 30000 on): between
/// now and the program's start, no connection and no listener that asks for any port is given one of these.
const FIRST: u16 = 10_000;
/// Processes of tests at the same time, at most.
const PROCESSES: u16 = 200;
/// Ports of each.
const EACH: u16 = 100;

/// The first of this process's ports. It is held for as long as the process lives, so that no other one hands out the rest.
static OWN: LazyLock<(u16, TcpListener)> = LazyLock::new(|| {
    let tried = (std::process::id() % u32::from(PROCESSES)) as u16;
    let mut firsts = (0..PROCESSES).map(|next| FIRST + (tried + next) % PROCESSES * EACH);
    let held = firsts.find_map(|first| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, first));
        Some((first, listener.ok()?))
    });
    held.expect("ports that no other process of tests has")
});
static TRIED: AtomicU16 = AtomicU16::new(0);

/// An address of this machine where nobody listens.
pub fn free_address() -> SocketAddr {
    let (first, _) = *OWN;
    let mut addresses = (1..EACH).map(|_| {
        let next = TRIED.fetch_add(1, Ordering::Relaxed) % (EACH - 1);
        SocketAddr::from((Ipv4Addr::LOCALHOST, first + 1 + next))
    });
    let free = addresses.find(|address| TcpListener::bind(address).is_ok());
    free.expect("a free port")
}
