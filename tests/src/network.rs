//! Several networks on one machine, with a router between them: a namespace for each, so that programs in one have no address of the others.
//! Takes root and `ip` (iproute2).

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::process::Command;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::command::run;
use crate::process::under;

/// A network with one machine in it.
pub struct Network {
    namespace: Namespace,
    /// Of its machine.
    pub address: Ipv4Addr,
    number: u8,
}

/// Networks that reach each other over a router.
pub struct Networks {
    pub each: Vec<Network>,
    router: Namespace,
}

/// Removed on drop.
struct Namespace(String);

/// Of the router, in all networks.
pub const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
/// The other end of a machine's link to it.
pub(crate) const UPLINK: &str = "uplink";

impl Networks {
    /// `count` of them.
    pub fn new(count: u8) -> Networks {
        let name = |part: &str| format!("prima-{}-{part}", std::process::id());
        let router = Namespace::new(name("router"));
        router.ip(&["link", "set", "lo", "up"]);
        router.ip(&["address", "add", &format!("{ROUTER}/32"), "dev", "lo"]);
        let forward = "/proc/sys/net/ipv4/ip_forward";
        let forwarding = router.enter(shell(&format!("echo 1 > {forward}")));
        run(forwarding, "").expect("a router");
        let network = |number: u8| {
            let namespace = Namespace::new(name(&number.to_string()));
            let address = Ipv4Addr::new(10, 78, number, 2);
            let gateway = Ipv4Addr::new(10, 78, number, 1);
            let (port, other) = (port(number), &namespace.0);
            router.ip(&[
                "link", "add", &port, "type", "veth", "peer", "name", UPLINK, "netns", other,
            ]);
            router.ip(&["address", "add", &format!("{gateway}/24"), "dev", &port]);
            router.ip(&["link", "set", &port, "up"]);
            namespace.ip(&["link", "set", "lo", "up"]);
            namespace.ip(&["address", "add", &format!("{address}/24"), "dev", UPLINK]);
            namespace.ip(&["link", "set", UPLINK, "up"]);
            namespace.ip(&["route", "add", "default", "via", &gateway.to_string()]);
            Network {
                namespace,
                address,
                number,
            }
        };
        Networks {
            each: (1..=count).map(network).collect(),
            router,
        }
    }

    /// Does something on the router, as does all that `work` starts. Every network reaches what listens at [`ROUTER`] there.
    pub fn within_router<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.router.within(work)
    }
}

impl Network {
    /// `command`, in this network.
    pub(crate) fn enter(&self, command: Command) -> Command {
        self.namespace.enter(command)
    }

    /// Does something in this network: connecting to its addresses, for example.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.namespace.within(work)
    }

    /// As if its cable were pulled.
    pub fn cut_off(&self) {
        self.namespace.ip(&["link", "set", UPLINK, "down"]);
    }

    /// The link to the router, as the router calls it.
    pub(crate) fn port(&self) -> String {
        port(self.number)
    }
}

impl Namespace {
    fn new(name: String) -> Namespace {
        run(ip(&["netns", "add", &name]), "").expect("a namespace of its own");
        Namespace(name)
    }

    fn enter(&self, command: Command) -> Command {
        under(ip(&["netns", "exec", &self.0]), &command)
    }

    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/run/netns/{}", self.0));
        let namespace = namespace.expect("the network's namespace");
        let work = || {
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), network).expect("enter the network");
            work()
        };
        thread::scope(|scope| scope.spawn(work).join().expect("work that does not panic"))
    }

    fn ip(&self, arguments: &[&str]) {
        let arguments = [&["-n", &self.0], arguments].concat();
        run(ip(&arguments), "").unwrap_or_else(|error| panic!("ip {arguments:?}: {error}"));
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Who is killed leaves it behind: an empty one, which disturbs nobody.
        let _ = run(ip(&["netns", "delete", &self.0]), "");
    }
}

fn port(network: u8) -> String {
    format!("port-{network}")
}

fn ip(arguments: &[&str]) -> Command {
    let mut command = Command::new("ip");
    command.args(arguments);
    command
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}
