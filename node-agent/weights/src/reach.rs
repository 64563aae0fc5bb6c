//! Which servers may be asked for model files. Whoever may write Models names servers, and the operator and the agents ask them: without a
//! limit such a person could look at what only the cluster can reach.
//!
//! Decides: servers that the installation names are asked whatever their addresses are; all others only on addresses of the internet.
//! Every request is looked at, redirects too, and a name after it was resolved, so that what it means later does not matter.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use crate::held::blocking;

/// The servers that one client may ask.
#[derive(Debug, Clone, Default)]
pub struct Reach(Option<Arc<[AllowedServer]>>);

/// A server, or a network of them, that the installation names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowedServer {
    /// By its name, in lower case; one that begins with a dot stands for all below it.
    Name(String),
    Network(IpNet),
}

/// What cannot be an [`AllowedServer`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{found:?}: expected the name of a server, an address or a network, such as nas.home.arpa, .hf.co (all below it), 192.168.1.7 or 192.168.1.0/24"
)]
pub struct AllowedServerError {
    found: String,
}

/// A server is not on the internet, and the installation does not name it.
#[derive(Debug, thiserror::Error)]
#[error("the server is not on the internet")]
pub(crate) struct OutOfReach;

impl FromStr for AllowedServer {
    type Err = AllowedServerError;

    fn from_str(text: &str) -> Result<Self, AllowedServerError> {
        let text = text.trim();
        let network = text
            .parse()
            .or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        if let Ok(network) = network {
            return Ok(Self::Network(network));
        }
        let letters = text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        // What has no letter would be an address, and is none.
        let named = text.bytes().any(|byte| byte.is_ascii_alphabetic());
        match letters && named && text.len() <= 253 {
            true => Ok(Self::Name(text.to_ascii_lowercase())),
            false => Err(AllowedServerError {
                found: text.chars().take(120).collect(),
            }),
        }
    }
}

impl Reach {
    /// No limit. The tests' servers are on their own machine.
    pub fn anywhere() -> Self {
        Self(None)
    }

    /// The internet, `hub` and `allowed`.
    pub fn internet_and(hub: &str, allowed: &[AllowedServer]) -> Self {
        let hub = Url::parse(hub).ok();
        let hub = hub.and_then(|hub| hub.host_str()?.trim_matches(['[', ']']).parse().ok());
        Self(Some(allowed.iter().cloned().chain(hub).collect()))
    }

    /// Whether the server of `url` may be asked whatever its name means; `Err` if it may not be asked at all, as far as its name tells.
    pub(crate) fn names(&self, url: &Url) -> Result<bool, OutOfReach> {
        let Some(allowed) = &self.0 else {
            return Ok(true);
        };
        let host = url.host_str().unwrap_or_default();
        match host.trim_matches(['[', ']']).parse() {
            Ok(address) => match self.holds(address) {
                true => Ok(true),
                false => Err(OutOfReach),
            },
            // The parser writes names in lower case.
            Err(_) => Ok(allowed.iter().any(|server| match server {
                AllowedServer::Name(name) if name.starts_with('.') => host.ends_with(name),
                AllowedServer::Name(name) => host == name,
                AllowedServer::Network(_) => false,
            })),
        }
    }

    fn holds(&self, address: IpAddr) -> bool {
        let in_network = |server: &AllowedServer| matches!(server, AllowedServer::Network(network) if network.contains(&address.to_canonical()));
        let Some(allowed) = &self.0 else {
            return true;
        };
        is_on_the_internet(address) || allowed.iter().any(in_network)
    }
}

impl Resolve for Reach {
    fn resolve(&self, name: Name) -> Resolving {
        let reach = self.clone();
        Box::pin(async move {
            // The port is set by whoever connects.
            let found = blocking(move || (name.as_str(), 0).to_socket_addrs()).await??;
            let held: Vec<SocketAddr> = found.filter(|found| reach.holds(found.ip())).collect();
            match held.is_empty() {
                true => Err(OutOfReach.into()),
                false => Ok(Box::new(held.into_iter()) as Addrs),
            }
        })
    }
}

/// Whether IANA's registries of special addresses say that one of the internet can have it.
fn is_on_the_internet(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let special = match address.octets() {
        // This network; private; loopback; link-local, where clouds serve their secrets.
        [0 | 10 | 127, ..] | [172, 16..=31, ..] | [192, 168, ..] | [169, 254, ..] => true,
        // Shared by a provider's clients, and by VPNs.
        [100, 64..=127, ..] => true,
        // Protocols, benchmarks, documentation.
        [192, 0, 0 | 2, _] | [198, 18 | 19, ..] | [198, 51, 100, _] | [203, 0, 113, _] => true,
        // 6to4 relays; multicast, reserved, broadcast.
        [192, 88, 99, _] | [224..=255, ..] => true,
        _ => false,
    };
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, c, .., y, z] = address.segments();
    let v4 = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match (a, b) {
        // NAT64 and 6to4 carry an address of version 4.
        (0x64, 0xff9b) => address.segments()[2..6] == [0; 4] && v4(y, z),
        (0x2002, _) => v4(b, c),
        // Protocols such as Teredo; documentation.
        (0x2001, 0..=0x1ff | 0xdb8) | (0x3fff, 0..=0xfff) => false,
        // All that has been given out.
        (0x2000..=0x3fff, _) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_the_internet(address: &str) -> bool {
        is_on_the_internet(address.parse().unwrap())
    }

    #[test]
    fn special_addresses_are_not_on_the_internet() {
        for address in [
            "0.0.0.0",
            "10.96.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.168.1.7",
            "198.18.0.1",
            "203.0.113.7",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2001:db8::1",
            "2001::1",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "::7f00:1",
        ] {
            assert!(!on_the_internet(address), "{address}");
        }
        for address in [
            "1.1.1.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.167.1.1",
            "169.253.1.1",
            "100.63.1.1",
            "100.128.0.1",
            "223.255.255.1",
            "::ffff:1.1.1.1",
            "64:ff9b::1.1.1.1",
            "2002:101:101::",
            "2606:4700::1111",
            "2a00:1450::1",
        ] {
            assert!(on_the_internet(address), "{address}");
        }
    }

    fn names(reach: &Reach, url: &str) -> Option<bool> {
        reach.names(&Url::parse(url).unwrap()).ok()
    }

    #[test]
    fn what_the_installation_names_may_be_asked() {
        let allowed: Vec<AllowedServer> = ["NAS.home.arpa", ".hf.co", "192.168.1.0/24", "fd00::7"]
            .iter()
            .map(|text| text.parse().unwrap())
            .collect();
        let reach = Reach::internet_and("http://10.0.0.5:8080/hf", &allowed);
        for (url, expected) in [
            ("http://nas.home.arpa/m.gguf", Some(true)),
            ("http://nas.home.arpa:8080/m.gguf", Some(true)),
            // Resolved, and looked at then.
            ("http://other.home.arpa/m.gguf", Some(false)),
            ("https://cdn.hf.co/m.gguf", Some(true)),
            ("https://a.cdn.HF.co/m.gguf", Some(true)),
            ("https://hf.co/m.gguf", Some(false)),
            ("https://nothf.co/m.gguf", Some(false)),
            ("http://nas.home.arpa.evil.example/m.gguf", Some(false)),
            ("http://192.168.1.255/m.gguf", Some(true)),
            ("http://192.168.2.1/m.gguf", None),
            ("http://10.0.0.5/m.gguf", Some(true)),
            ("http://10.0.0.6/m.gguf", None),
            ("http://[fd00::7]/m.gguf", Some(true)),
            ("http://[fd00::8]/m.gguf", None),
            ("http://[::ffff:192.168.1.9]/m.gguf", Some(true)),
            ("http://[::ffff:10.0.0.6]/m.gguf", None),
            // An address in another way of writing.
            ("http://0x7f.1/m.gguf", None),
            ("http://2130706433/m.gguf", None),
            ("http://1.1.1.1/m.gguf", Some(true)),
        ] {
            assert_eq!(names(&reach, url), expected, "{url}");
        }
        assert_eq!(names(&Reach::anywhere(), "http://127.0.0.1/"), Some(true));
    }

    #[tokio::test]
    async fn a_name_means_what_it_resolves_to() {
        let resolved = async |allowed: &[AllowedServer]| {
            let reach = Reach::internet_and("https://hub.example", allowed);
            reach
                .resolve("localhost".parse().unwrap())
                .await
                .map(Iterator::count)
        };
        let refused = resolved(&[]).await.unwrap_err();
        assert!(refused.is::<OutOfReach>(), "{refused}");
        let loopback = ["127.0.0.0/8", "::1"].map(|text| text.parse().unwrap());
        assert!(resolved(&loopback).await.unwrap() > 0);
    }

    #[test]
    fn what_cannot_be_a_server_is_refused() {
        for text in [
            "",
            "nas home",
            "http://nas",
            "192.168.1",
            "192.168.1.0/33",
            "nas:8080",
            "nas/models",
        ] {
            let error = text.parse::<AllowedServer>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }
}
