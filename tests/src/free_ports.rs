//! Addresses for programs that others must find before they listen.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Below the ports that the system hands out itself (from 32768 on), and below those of Kubernetes' services (from 30000 on): between
/// now and the program's start, no connection and no listener that asks for any port is given one of these.
const FIRST: u16 = 10_000;
const COUNT: u16 = 20_000;
/// Ports before those that another process of tests tries first.
const EACH: u16 = 100;

static TRIED: AtomicU16 = AtomicU16::new(0);

/// An address of this machine where nobody listens.
pub fn free_address() -> SocketAddr {
    let own = (std::process::id() % u32::from(COUNT / EACH)) as u16 * EACH;
    let mut addresses = (0..COUNT).map(|_| {
        let next = TRIED.fetch_add(1, Ordering::Relaxed) % COUNT;
        SocketAddr::from((Ipv4Addr::LOCALHOST, FIRST + (own + next) % COUNT))
    });
    let free = addresses.find(|address| TcpListener::bind(address).is_ok());
    free.expect("a free port")
}
