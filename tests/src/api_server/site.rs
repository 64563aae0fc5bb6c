//! Where an API server runs: on an address of loopback that no other has, on one that a test's networks reach, or on a host of its own.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;

use super::PORT;
use crate::cluster::Host;
use crate::http;

pub(crate) struct Site {
    address: Ipv4Addr,
    /// `None`: this machine, as it is.
    host: Option<Arc<Host>>,
}

impl Site {
    /// All of 127.0.0.0/8 is this machine, so that each server can have the usual ports.
    pub(crate) fn loopback() -> Site {
        Site {
            address: free_loopback_address(PORT),
            host: None,
        }
    }

    /// An address that this machine has where the test runs.
    pub(crate) fn here(address: Ipv4Addr) -> Site {
        Site {
            address,
            host: None,
        }
    }

    pub(crate) fn host(host: Arc<Host>, address: Ipv4Addr) -> Site {
        Site {
            address,
            host: Some(host),
        }
    }

    pub(crate) fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// A connection from there, for this process: a socket stays in the network that it was made in.
    pub(crate) fn connect(&self, address: SocketAddr) -> io::Result<TcpStream> {
        match &self.host {
            Some(host) => host.within(|| http::connect(address)),
            None => http::connect(address),
        }
    }

    /// `command`, to be started there.
    pub(crate) fn enter(&self, command: Command) -> Command {
        match &self.host {
            Some(host) => host.enter(command),
            None => command,
        }
    }
}

/// An address of this machine at which nobody has `port`, and that no other test is likely to take.
pub(crate) fn free_loopback_address(port: u16) -> Ipv4Addr {
    let random = RandomState::new();
    let is_free = |address: &Ipv4Addr| TcpListener::bind((*address, port)).is_ok();
    let candidates = (0..100).map(|attempt| {
        let [a, b, c, ..] = random.hash_one(attempt).to_le_bytes();
        Ipv4Addr::new(127, a, b, c)
    });
    let address = { candidates }.find(is_free);
    address.expect("a free address in 127.0.0.0/8")
}
