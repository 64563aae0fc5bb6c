//! The machines that are lent to the ring (`--member`): has prima-node-agent find out what they can do, and how they are linked.

use std::io;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_crds::v1alpha1::ring_plan::RingMember;
use prima_member_process::{Borrowed, Place, lender_address, requests};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::{sleep, timeout};

use super::agents::{self, AgentsError};
use super::screen::Screen;

/// How often a machine that left is looked for.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// One that is there and cannot be used is looked at less and less often.
const LOOK_AGAIN_AT_MOST: Duration = Duration::from_secs(300);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const IDLE_LOOKS: usize = 5;
const IDLE_PAUSE: Duration = Duration::from_secs(1);

/// Why the machines cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LentError {
    #[error(transparent)]
    Agents(#[from] AgentsError),
    #[error("cannot run prima-node-agent borrow")]
    Run(#[source] io::Error),
    #[error("--member: {0}")]
    Look(String),
    #[error("prima-node-agent borrow wrote something else than what it found")]
    Found(#[source] serde_json::Error),
}

/// What can be known of `lenders`, `HOST:PORT` or `HOST:PORT#WORD`; `None` if there are none. `leave_out`: without those that cannot be used.
pub async fn look(
    lenders: &[String],
    leave_out: bool,
    screen: &Screen,
) -> Result<Option<Borrowed>, LentError> {
    if lenders.is_empty() {
        return Ok(None);
    }
    let mut command = Command::new(agents::program()?);
    command
        .args(["borrow", "look"])
        .args(leave_out.then_some("--leave-out"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    // Words are secrets, which arguments are not.
    let stdin = lenders.join("\n");
    let (said, output) = agents::followed(command, stdin, screen)
        .await
        .map_err(LentError::Run)?;
    if !output.status.success() {
        return Err(LentError::Look(said));
    }
    serde_json::from_slice(&output.stdout).map_err(LentError::Found)
}

/// Waits until a machine can be used that is named in `lenders` and takes no part, and `http`, where the ring without it serves, has nothing
/// to do. Returns its address, `HOST:PORT`.
pub async fn returned(
    lenders: &[String],
    borrowed: Option<&Borrowed>,
    http: SocketAddr,
    screen: &Screen,
) -> String {
    let takes_part = |address: &str| {
        let mut lent = borrowed.iter().flat_map(|borrowed| &borrowed.lent);
        lent.any(|lent| lent.lender == address)
    };
    let absent = lenders.iter().map(|lender| address_of(lender));
    let absent: Vec<String> = absent.filter(|address| !takes_part(address)).collect();
    let mut pause = LOOK_AGAIN;
    loop {
        sleep(pause).await;
        for address in &absent {
            let there = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await;
            if !matches!(there, Ok(Ok(_))) || !is_idle(http).await {
                continue;
            }
            // Somebody else may have borrowed it, or it may not reach this machine.
            match look(std::slice::from_ref(address), false, screen).await {
                Ok(_) => return address.clone(),
                Err(error) => {
                    screen.status(&format!("{address} is back, and cannot be used: {error}"));
                    pause = (2 * pause).min(LOOK_AGAIN_AT_MOST);
                }
            }
        }
    }
}

async fn is_idle(http: SocketAddr) -> bool {
    // Not only between two requests of a conversation.
    for _ in 0..IDLE_LOOKS {
        if requests(http).await != Some(0) {
            return false;
        }
        sleep(IDLE_PAUSE).await;
    }
    true
}

/// `HOST:PORT` of what the command line names.
pub fn address_of(lender: &str) -> String {
    let named = lender.split('#').next().unwrap_or(lender);
    lender_address(named).unwrap_or_else(|| named.to_owned())
}

/// This machine and the others as they are planned with: `own` is what this machine measured.
pub fn profiles(borrowed: &Borrowed, mut own: NodeProfile) -> Vec<NodeProfile> {
    own.metadata.name = Some(borrowed.own.place.name.clone());
    if let Some(status) = &mut own.status {
        status.links = borrowed.own.links.clone();
    }
    let lent = borrowed.lent.iter().map(|lent| lent.profile.clone());
    std::iter::once(own).chain(lent).collect()
}

/// The members that a ring can have, this machine first, without layers.
pub fn members(borrowed: &Borrowed) -> Vec<RingMember> {
    let member = |place: &Place| RingMember {
        public_key_sha256: Some(place.public_key_sha256.clone()),
        ..RingMember::new(place.name.clone(), place.address.clone(), Vec::new())
    };
    let lent = borrowed.lent.iter().map(|lent| &lent.place);
    std::iter::once(&borrowed.own.place)
        .chain(lent)
        .map(member)
        .collect()
}

/// `HOST:PORT` of the agent that lends the machine of this member, if it is lent.
pub fn lender<'a>(borrowed: Option<&'a Borrowed>, member: &str) -> Option<&'a str> {
    let mut lent = borrowed?.lent.iter();
    let lent = lent.find(|lent| lent.place.name == member)?;
    Some(&lent.lender)
}
