//! The network of a cluster: which addresses its hosts and pods have, and the links that tests cut. All of it lies in the control
//! plane's own network, so that every cluster has the same addresses.

use std::net::Ipv4Addr;
use std::process::Command;

use super::host::Host;
use crate::command::{CommandError, run};

pub(crate) const CONTROL_PLANE: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
/// Of a test's own registry of images, on the control plane's host.
pub(crate) const REGISTRY_PORT: u16 = 5000;
/// Network of all pods.
pub(crate) const POD_NETWORK: &str = "10.244.0.0/16";
/// A node's end of its link.
pub(crate) const UPLINK: &str = "uplink";

pub(crate) fn node_address(node: usize) -> Ipv4Addr {
    Ipv4Addr::new(172, 30, 0, 10 + node as u8)
}

/// Network of one node's pods.
pub(crate) fn pod_network(node: usize) -> String {
    format!("10.244.{node}.0/24")
}

/// Makes the bridge that all nodes are linked to; every host knows the way to every pod.
pub(crate) fn make_bridge(control_plane: &Host, nodes: usize) -> Result<(), CommandError> {
    // A bridge without an address of its own takes that of one of its links, which come and go.
    control_plane.run("ip link add nodes address 02:00:00:00:00:01 type bridge")?;
    control_plane.run(&format!("ip address add {CONTROL_PLANE}/24 dev nodes"))?;
    control_plane.run("ip link set nodes up")?;
    add_routes(control_plane, 0..nodes)
}

/// Links a node's host, of which there are `nodes`, to the bridge.
pub(crate) fn link_node(
    control_plane: &Host,
    host: &Host,
    node: usize,
    nodes: usize,
) -> Result<(), CommandError> {
    let mut link = Command::new("ip");
    // A machine that restarts has the address that the others remember.
    let hardware_address = format!("02:00:00:00:01:{node:02x}");
    link.args(["link", "add", &link_name(node), "netns"])
        .arg(control_plane.process().to_string())
        .args(["type", "veth", "peer", "name", UPLINK])
        .args(["address", &hardware_address, "netns"])
        .arg(host.process().to_string());
    run(link, "")?;
    control_plane.run(&format!("ip link set {} master nodes up", link_name(node)))?;
    let address = node_address(node);
    host.run(&format!("ip address add {address}/24 dev {UPLINK}"))?;
    host.run(&format!("ip link set {UPLINK} up"))?;
    host.run(&format!("ip route add default via {CONTROL_PLANE}"))?;
    add_routes(host, (0..nodes).filter(|&other| other != node))
}

/// Takes the link of a node away that has ended. The kernel does that, too, but some time after the node's last process.
pub(crate) fn unlink_node(control_plane: &Host, node: usize) {
    // It may have gone already.
    let _ = control_plane.run(&format!("ip link delete {}", link_name(node)));
}

/// As if someone pulled its network plug, or put it back.
pub(crate) fn set_link(control_plane: &Host, node: usize, up: bool) -> Result<(), CommandError> {
    let state = if up { "up" } else { "down" };
    let set = control_plane.run(&format!("ip link set {} {state}", link_name(node)));
    set.map(drop)
}

/// Lets a node's link take so much (`tc`) each way, and hold back what comes within a second; `None`: all again.
pub(crate) fn set_rate(
    control_plane: &Host,
    host: &Host,
    node: usize,
    rate: Option<&str>,
) -> Result<(), CommandError> {
    for (host, end) in [(control_plane, link_name(node)), (host, UPLINK.to_owned())] {
        host.run(&match rate {
            Some(rate) => {
                format!("tc qdisc add dev {end} root tbf rate {rate} burst 8k latency 1s")
            }
            None => format!("tc qdisc delete dev {end} root"),
        })?;
    }
    Ok(())
}

fn add_routes(host: &Host, nodes: impl Iterator<Item = usize>) -> Result<(), CommandError> {
    for node in nodes {
        let (network, address) = (pod_network(node), node_address(node));
        host.run(&format!("ip route add {network} via {address}"))?;
    }
    Ok(())
}

/// Name of a node's link, at the end of the bridge.
fn link_name(node: usize) -> String {
    format!("node-{node}")
}
