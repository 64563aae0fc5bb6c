//! The links to other machines, measured over the ring's transport (`ring::link`); if there are none, the link to this
//! machine itself, which a ring on one machine uses.

use std::net::Ipv4Addr;

use prima_crds::v1alpha1::node_profile::LinkProfile;

use crate::ring::{Connector, EchoServer, LinkError, LinkMeasurement, measure_link};

use super::system;

/// The name of the link to this machine itself.
pub const LOOPBACK: &str = "loopback";

/// Another machine, and where an agent serves on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkTarget {
    pub name: String,
    pub address: String,
}

/// `NAME=HOST:PORT`.
pub fn parse_target(text: &str) -> Result<LinkTarget, String> {
    let (name, address) = text
        .split_once('=')
        .ok_or_else(|| "expected NAME=HOST:PORT".to_owned())?;
    let port = address
        .rsplit_once(':')
        .map(|(host, port)| (host, port.parse::<u16>()));
    match port {
        Some((host, Ok(1..))) if !host.is_empty() => Ok(LinkTarget {
            name: system::check_name(name)?,
            address: address.to_owned(),
        }),
        _ => Err(format!(
            "expected HOST:PORT after the name, found {address:?}"
        )),
    }
}

/// Measures the link to `target`; over TLS if there is a connector.
///
/// # Errors
/// As [`measure_link`].
pub fn measure(
    target: &LinkTarget,
    connector: Option<Connector>,
) -> Result<LinkProfile, LinkError> {
    Ok(profile(
        &target.name,
        measure_link(&target.address, connector)?,
    ))
}

/// Measures the link to this machine.
///
/// # Errors
/// As [`measure_link`].
pub fn measure_loopback() -> Result<LinkProfile, LinkError> {
    let server = EchoServer::start((Ipv4Addr::LOCALHOST, 0).into(), None)?;
    Ok(profile(
        LOOPBACK,
        measure_link(&server.address().to_string(), None)?,
    ))
}

fn profile(to: &str, measured: LinkMeasurement) -> LinkProfile {
    LinkProfile {
        to: to.to_owned(),
        latency_nanoseconds: measured.latency.as_nanos() as i64,
        bytes_per_second: measured.bytes_per_second as i64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_name_and_an_address() {
        let target = parse_target("laptop=10.0.0.7:7000").unwrap();
        assert_eq!(
            (target.name.as_str(), target.address.as_str()),
            ("laptop", "10.0.0.7:7000")
        );
        assert!(parse_target("laptop=[::1]:7000").is_ok());
        for bad in [
            "laptop",
            "laptop=host",
            "laptop=:7000",
            "laptop=host:0",
            "laptop=host:x",
            "=host:1",
            "a/b=host:1",
        ] {
            assert!(parse_target(bad).is_err(), "{bad}");
        }
    }
}
