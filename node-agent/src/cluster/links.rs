//! The links to the other machines of the cluster, as their NodeProfiles name them. They are measured one at a time, each once, and again
//! when the measurement is a day old, when the other agent has another address, or, after a pause, when measuring failed. The pause becomes
//! longer, but not where the other agent was only busy with a third.
//!
//! An agent whose profile names a key is measured over TLS, and may measure this machine; one of an earlier version is measured without, and
//! cannot measure this machine until it is updated: what it measured before stays.
//!
//! Decides when to measure, and who may; `ring::link` decides what is measured.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use kube::api::DynamicObject;
use kube::runtime::watcher::Event;
use kube::{Client, ResourceExt as _};
use prima_crds::v1alpha1::node_profile::{LinkProfile, NodeProfile, NodeProfileStatus};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep_until};

use super::api;
use super::backoff::{Backoff, jittered};
use super::metrics::{Established, Step};
use crate::profile::links::{LOOPBACK, LinkTarget, measure};
use crate::ring::{self, Fingerprint, LinkError, OwnKey, Pins};

const VALID: Duration = Duration::from_secs(24 * 60 * 60);
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(10 * 60);
/// Within this time a link from an earlier agent's profile is measured again.
const SPREAD: Duration = Duration::from_secs(5 * 60);

/// What the links of this machine depend on.
pub struct Links {
    /// This machine.
    pub node: String,
    /// Where agents answer measurements; the same everywhere.
    pub port: u16,
    /// The key that is shown to other agents.
    pub own: OwnKey,
    /// Who may measure the link to this machine: all agents that have a key.
    pub pins: Pins,
    pub profile: watch::Sender<NodeProfileStatus>,
    /// Told when somebody deleted this machine's NodeProfile.
    pub deleted: Arc<Notify>,
    pub established: Established,
}

/// Measures for ever.
pub async fn follow(client: Client, links: Links) {
    let mut events = api::watch_all::<NodeProfile>(client);
    let mut peers = Peers::default();
    let mut listed = BTreeSet::new();
    let mut measuring: Option<JoinHandle<(String, Result<LinkProfile, LinkError>)>> = None;
    loop {
        if measuring.is_none()
            && let Some((target, key)) = peers.due(Instant::now(), links.port)
        {
            let own = links.own.clone();
            measuring = Some(spawn_blocking(move || {
                let connector = key.map(|key| ring::connector(own, key));
                let measured = match connector.transpose() {
                    Ok(connector) => measure(&target, connector),
                    Err(error) => Err(LinkError::Tls(error)),
                };
                (target.name, measured)
            }));
        }
        let next = peers.next_due().filter(|_| measuring.is_none());
        tokio::select! {
            event = events.next() => match event {
                Some(Event::Init) => listed.clear(),
                Some(Event::InitApply(profile)) => {
                    listed.insert(profile.name_any());
                    links.seen(&profile, &mut peers);
                }
                Some(Event::InitDone) => {
                    links.established.done(Step::Profiles);
                    if !listed.contains(&links.node) {
                        links.deleted.notify_one();
                    }
                    peers.keep(|name| listed.contains(name));
                    links.forget(&peers);
                }
                Some(Event::Apply(profile)) => links.seen(&profile, &mut peers),
                Some(Event::Delete(profile)) => {
                    let name = profile.name_any();
                    if name == links.node {
                        links.deleted.notify_one();
                    }
                    peers.keep(|known| known != name);
                    links.forget(&peers);
                }
                // Watches do not end.
                None => return,
            },
            measured = wait(&mut measuring) => {
                measuring = None;
                if let Some((name, measured)) = measured {
                    links.measured(&name, measured, &mut peers);
                }
            }
            () = until(next) => {}
        }
    }
}

/// Pending where there is nothing to wait for; `None` after a panic, which has been printed.
async fn wait<T>(task: &mut Option<JoinHandle<T>>) -> Option<T> {
    match task {
        Some(task) => task.await.ok(),
        None => std::future::pending().await,
    }
}

async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

impl Links {
    fn seen(&self, profile: &DynamicObject, peers: &mut Peers) {
        let name = profile.name_any();
        if name == self.node {
            return;
        }
        let address = profile.data.pointer("/status/agent/address");
        let Some(address) = address.and_then(|address| address.as_str()?.parse().ok()) else {
            // No agent runs there yet.
            return;
        };
        let known = self
            .profile
            .borrow()
            .links
            .iter()
            .any(|link| link.to == name);
        let key = profile.data.pointer("/status/agent/publicKeySha256");
        let key = key.and_then(|key| key.as_str()?.parse().ok());
        peers.seen(name, (address, key), known, Instant::now());
        self.pins.set(peers.keys());
    }

    fn measured(&self, name: &str, measured: Result<LinkProfile, LinkError>, peers: &mut Peers) {
        let now = Instant::now();
        match measured {
            Ok(link) => {
                tracing::info!(
                    to = name,
                    latency_microseconds = link.latency_nanoseconds / 1000,
                    megabytes_per_second = link.bytes_per_second / 1_000_000,
                    "measured a link"
                );
                // It may have gone meanwhile.
                if peers.succeeded(name, now) {
                    self.profile.send_modify(|status| {
                        status.links.retain(|known| known.to != link.to);
                        status.links.push(link);
                        status.links.sort_by(|a, b| a.to.cmp(&b.to));
                    });
                }
            }
            Err(error) => {
                let pause = peers.failed(name, &error, now);
                tracing::warn!(
                    to = name,
                    problem = prima_crds::error_chain(&error),
                    again_in_seconds = pause.map_or(0, |pause| pause.as_secs()),
                    "cannot measure a link"
                );
            }
        }
    }

    /// Removes links to machines that are gone, and keeps these out.
    fn forget(&self, peers: &Peers) {
        self.pins.set(peers.keys());
        self.profile.send_if_modified(|status| {
            let before = status.links.len();
            status
                .links
                .retain(|link| link.to == LOOPBACK || peers.0.contains_key(&link.to));
            status.links.len() != before
        });
    }
}

/// The other machines, and when each link is to be measured.
#[derive(Default)]
struct Peers(BTreeMap<String, Peer>);

struct Peer {
    address: IpAddr,
    /// None of an agent of an earlier version.
    key: Option<Fingerprint>,
    due: Instant,
    backoff: Backoff,
}

impl Peers {
    /// `known`: there is a measurement of an earlier agent.
    fn seen(
        &mut self,
        name: String,
        (address, key): (IpAddr, Option<Fingerprint>),
        known: bool,
        now: Instant,
    ) {
        match self.0.get_mut(&name) {
            Some(peer) if peer.address == address => peer.key = key,
            Some(peer) => {
                peer.address = address;
                peer.key = key;
                peer.due = now;
                peer.backoff.reset();
            }
            None => {
                let due = match known {
                    true => now + jittered(SPREAD),
                    false => now,
                };
                let backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
                self.0.insert(
                    name,
                    Peer {
                        address,
                        key,
                        due,
                        backoff,
                    },
                );
            }
        }
    }

    fn keep(&mut self, mut wanted: impl FnMut(&str) -> bool) {
        self.0.retain(|name, _| wanted(name));
    }

    fn next_due(&self) -> Option<Instant> {
        self.0.values().map(|peer| peer.due).min()
    }

    /// The link to measure now, the longest due first, and the key of who answers there.
    fn due(&self, now: Instant, port: u16) -> Option<(LinkTarget, Option<Fingerprint>)> {
        let (name, peer) = self.0.iter().min_by_key(|(_, peer)| peer.due)?;
        let target = || LinkTarget {
            name: name.clone(),
            address: SocketAddr::new(peer.address, port).to_string(),
        };
        (peer.due <= now).then(|| (target(), peer.key))
    }

    fn keys(&self) -> impl Iterator<Item = Fingerprint> {
        self.0.values().filter_map(|peer| peer.key)
    }

    /// Whether it is still there.
    fn succeeded(&mut self, name: &str, now: Instant) -> bool {
        let Some(peer) = self.0.get_mut(name) else {
            return false;
        };
        peer.backoff.reset();
        peer.due = now + jittered(VALID);
        true
    }

    /// How long it is until the next try; `None` if it is gone. Many agents that start together measure each other, and find each other busy again
    /// and again.
    fn failed(&mut self, name: &str, error: &LinkError, now: Instant) -> Option<Duration> {
        let peer = self.0.get_mut(name)?;
        let pause = match error.is_busy() {
            true => jittered(FIRST_PAUSE),
            false => peer.backoff.next(),
        };
        peer.due = now + pause;
        Some(pause)
    }
}

#[cfg(test)]
mod tests {
    use tonic::Status;

    use super::*;

    fn refused(status: Status) -> LinkError {
        LinkError::Refused {
            address: "10.0.0.7:9190".to_owned(),
            status,
        }
    }

    fn address(last: u8) -> (IpAddr, Option<Fingerprint>) {
        (IpAddr::from([10, 0, 0, last]), None)
    }

    #[tokio::test]
    async fn a_link_is_measured_daily_and_at_another_address() {
        let mut peers = Peers::default();
        let now = Instant::now();
        let at = |peers: &Peers, later: Duration| {
            let due = peers.due(now + later, 9190);
            due.map(|(target, _)| target.address)
        };
        assert_eq!(at(&peers, VALID), None);
        peers.seen("pi".into(), address(7), false, now);
        assert_eq!(at(&peers, Duration::ZERO).as_deref(), Some("10.0.0.7:9190"));

        assert!(peers.succeeded("pi", now));
        peers.seen("pi".into(), address(7), true, now);
        assert_eq!(at(&peers, VALID / 2), None);
        assert!(at(&peers, VALID * 12 / 10).is_some());

        peers.seen("pi".into(), address(8), true, now);
        assert_eq!(at(&peers, Duration::ZERO).as_deref(), Some("10.0.0.8:9190"));
    }

    #[tokio::test]
    async fn a_failure_is_tried_again_and_what_is_gone_is_not() {
        let mut peers = Peers::default();
        let now = Instant::now();
        peers.seen("pi".into(), address(7), false, now);
        let error = refused(Status::unimplemented("it measures no links"));
        let first = peers.failed("pi", &error, now).unwrap();
        let second = peers.failed("pi", &error, now).unwrap();
        assert!(second > first, "{first:?}, {second:?}");
        assert!(peers.due(now + first, 1).is_none());
        assert!(peers.due(now + second, 1).is_some());
        peers.keep(|name| name != "pi");
        assert!(peers.next_due().is_none() && peers.failed("pi", &error, now).is_none());
        assert!(!peers.succeeded("pi", now));
    }

    #[tokio::test]
    async fn who_is_busy_is_asked_again_soon() {
        let mut peers = Peers::default();
        let now = Instant::now();
        peers.seen("pi".into(), address(7), false, now);
        let soon = FIRST_PAUSE * 12 / 10;
        let busy = refused(Status::resource_exhausted("another machine measures"));
        for _ in 0..9 {
            assert!(peers.failed("pi", &busy, now).unwrap() < soon);
        }
        assert!(peers.due(now + soon, 1).is_some());
        // Nor does the first failure count as the tenth.
        let error = refused(Status::unimplemented("it measures no links"));
        assert!(peers.failed("pi", &error, now).unwrap() < soon);
        assert!(peers.failed("pi", &error, now).unwrap() > soon);
    }

    #[tokio::test]
    async fn a_link_known_from_before_is_not_measured_at_once() {
        let mut peers = Peers::default();
        let now = Instant::now();
        peers.seen("pi".into(), address(7), true, now);
        peers.seen("desk".into(), address(9), false, now);
        assert_eq!(peers.due(now, 1).unwrap().0.name, "desk");
        assert!(peers.succeeded("desk", now));
        assert!(peers.due(now, 1).is_none());
        assert_eq!(peers.due(now + SPREAD * 2, 1).unwrap().0.name, "pi");
    }

    #[tokio::test]
    async fn a_peer_is_measured_by_its_newest_key() {
        let mut peers = Peers::default();
        let now = Instant::now();
        let [first, second] = [b"1", b"2"].map(|key| Fingerprint::of(key));
        let due = |peers: &Peers| peers.due(now, 1).unwrap().1;
        for key in [None, Some(first), Some(second), None] {
            peers.seen("pi".into(), (address(7).0, key), false, now);
            assert_eq!(due(&peers), key);
            assert_eq!(peers.keys().collect::<Vec<_>>(), Vec::from_iter(key));
        }
        // With a new address, too.
        peers.seen("pi".into(), (address(8).0, Some(first)), false, now);
        assert_eq!(due(&peers), Some(first));
        peers.keep(|_| false);
        assert_eq!(peers.keys().count(), 0);
    }
}
