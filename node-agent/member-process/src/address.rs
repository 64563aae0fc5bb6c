//! How other machines reach what listens here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Where `prima agent` listens unless it is told otherwise.
pub const LENDER_PORT: u16 = 9190;

/// `HOST:PORT` of `HOST` or `HOST:PORT`, as people write it; `None` if it is neither.
pub fn lender_address(text: &str) -> Option<String> {
    // Of IPv6 with a port, brackets are around the address.
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => {
            (host, port.parse().ok()?)
        }
        _ => (text, LENDER_PORT),
    };
    let bare = host.trim_matches(['[', ']']);
    let nowhere = bare.parse().is_ok_and(|ip: IpAddr| ip.is_unspecified());
    if bare.is_empty() || port == 0 || nowhere || host.contains(char::is_whitespace) {
        return None;
    }
    Some(match bare.contains(':') {
        true => format!("[{bare}]:{port}"),
        false => format!("{host}:{port}"),
    })
}

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

/// The same port of all addresses of this kind. In a pod these include loopback, over which `kubectl port-forward` connects.
pub fn on_all_addresses(address: SocketAddr) -> SocketAddr {
    let any = match address.is_ipv4() {
        true => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        false => IpAddr::from(Ipv6Addr::UNSPECIFIED),
    };
    SocketAddr::new(any, address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_addresses_are_of_the_kind_of_the_one() {
        for (one, all) in [
            ("10.0.0.7:9191", "0.0.0.0:9191"),
            ("[fd00::7]:9191", "[::]:9191"),
        ] {
            assert_eq!(on_all_addresses(one.parse().unwrap()).to_string(), all);
        }
    }

    #[test]
    fn an_address_of_all_is_shown_as_one() {
        let one = SocketAddr::from(([127, 0, 0, 1], 8080));
        assert_eq!(reachable_address(one), one);
        let all = reachable_address(SocketAddr::from(([0, 0, 0, 0], 8080)));
        assert_eq!(all.port(), 8080);
    }
}
