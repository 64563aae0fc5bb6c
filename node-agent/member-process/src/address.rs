//! How other machines reach what listens here.

use std::net::{SocketAddr, UdpSocket};

/// The address that other machines can use, if it listens at all of them: the one from which this machine would reach others. Nothing is sent
/// to find that out.
pub fn reachable_address(listen: SocketAddr) -> SocketAddr {
    if !listen.ip().is_unspecified() {
        return listen;
    }
    // Addresses of documentation (RFC 5737, RFC 3849), which are routed as all others are.
    let elsewhere = match listen.is_ipv4() {
        true => "192.0.2.1:9",
        false => "[2001:db8::1]:9",
    };
    let own = UdpSocket::bind((listen.ip(), 0)).and_then(|socket| {
        socket.connect(elsewhere)?;
        socket.local_addr()
    });
    own.map_or(listen, |own| SocketAddr::new(own.ip(), listen.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_all_is_shown_as_one() {
        let one = SocketAddr::from(([127, 0, 0, 1], 8080));
        assert_eq!(reachable_address(one), one);
        let all = reachable_address(SocketAddr::from(([0, 0, 0, 0], 8080)));
        assert_eq!(all.port(), 8080);
    }
}
