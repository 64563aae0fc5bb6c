//! Whether this machine can honour a plan, as far as the plan and the machine's GPUs tell; the rest shows when it is tried.
//!
//! Refuses a plan for another machine or address, and says what would help. Pure: who calls looks for GPUs.

use std::net::{IpAddr, SocketAddr};

use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingMember, RingPlanError, RingPlanSpec};
use prima_engine::EngineError;

/// What a member's process is told in addition to its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchParams {
    pub rank: usize,
    /// Where the predecessor connects.
    pub listen: SocketAddr,
    /// Where rank 0 serves HTTP.
    pub http: Option<SocketAddr>,
    /// Whether it uses the machine's GPU.
    pub on_gpu: bool,
}

/// Why a plan cannot be honoured here.
#[derive(Debug, thiserror::Error)]
pub enum PlanRefused {
    #[error(transparent)]
    Plan(#[from] RingPlanError),
    #[error("spec.members: expected a member {node}, found none")]
    NotAMember { node: String },
    #[error("spec.members[{rank}].address: expected IP:PORT, found {found:?}; plan again")]
    Address { rank: usize, found: String },
    #[error(
        "spec.members[{rank}].address: this agent is reached at {own}, the plan was made for {planned}: its pod was replaced; plan again"
    )]
    OtherAddress {
        rank: usize,
        own: IpAddr,
        planned: IpAddr,
    },
    #[error(
        "spec.members[{rank}].publicKeySha256: this agent has another key than the plan was made for; plan again"
    )]
    OtherKey { rank: usize },
    #[error("spec.httpPort: expected a port where rank 0 serves HTTP, found none; plan again")]
    NoHttpPort,
    #[error(
        "spec.httpPort: expected another port than the ring's at spec.members[0].address, found {port} for both; plan again"
    )]
    SamePort { port: u16 },
    #[error(
        "spec.members[{rank}].{wanted} on a GPU, which this machine cannot use now; plan again"
    )]
    NoGpu {
        rank: usize,
        /// The field, and what it asks for.
        wanted: String,
        source: Box<EngineError>,
    },
}

/// How the agent of `node`, reached at `own` and known by `key`, starts its member of the plan. `has_gpu`: whether it could use one.
///
/// # Errors
/// [`PlanRefused`].
pub fn check(
    plan: &RingPlanSpec,
    node: &str,
    own: IpAddr,
    key: &str,
    has_gpu: impl FnOnce() -> Result<(), EngineError>,
) -> Result<LaunchParams, PlanRefused> {
    plan.validate()?;
    let rank = plan.rank_of(node).ok_or_else(|| PlanRefused::NotAMember {
        node: node.to_owned(),
    })?;
    let member = &plan.members[rank];
    let listen: SocketAddr = member.address.parse().map_err(|_| PlanRefused::Address {
        rank,
        found: member.address.clone(),
    })?;
    if listen.ip() != own {
        return Err(PlanRefused::OtherAddress {
            rank,
            own,
            planned: listen.ip(),
        });
    }
    if member
        .public_key_sha256
        .as_ref()
        .is_some_and(|planned| planned != key)
    {
        return Err(PlanRefused::OtherKey { rank });
    }
    let wanted = wanted_of_gpu(member);
    let on_gpu = wanted.is_some();
    if let Some(wanted) = wanted {
        has_gpu().map_err(|source| PlanRefused::NoGpu {
            rank,
            wanted,
            source: Box::new(source),
        })?;
    }
    let http = match (rank, plan.http_port) {
        // A validated port.
        (0, Some(port)) => Some(SocketAddr::new(own, port as u16)),
        (0, None) => return Err(PlanRefused::NoHttpPort),
        _ => None,
    };
    match http {
        Some(http) if http == listen => Err(PlanRefused::SamePort { port: http.port() }),
        _ => Ok(LaunchParams {
            rank,
            listen,
            http,
            on_gpu,
        }),
    }
}

/// The first field that asks for a GPU, and what it asks for.
fn wanted_of_gpu(member: &RingMember) -> Option<String> {
    let mut windows = member.windows.iter().enumerate();
    match windows.find(|(_, window)| window.gpu_layers > 0) {
        Some((round, window)) => Some(format!(
            "windows[{round}].gpuLayers: {} layers",
            window.gpu_layers
        )),
        None if member.output_head_on_gpu => Some("outputHeadOnGpu: the output head".to_owned()),
        None if member.draft_on_gpu => Some("draftOnGpu: the draft model".to_owned()),
        None => member
            .gpu_from_rows
            .map(|rows| format!("gpuFromRows: passes of at least {rows} rows")),
    }
}

/// Whether members fetch the model's file, rather than have it.
pub fn is_fetched(model: &PlannedModel) -> bool {
    let source = model.source.as_ref();
    source.is_some_and(|source| source.local_path().is_none())
}

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::ring_plan::PlannedDraft;

    use super::*;
    use crate::ring::test_plan::plan;

    const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 7));

    const KEY: &str = "000000000000000000000000000000000000000000000000000000000000000b";

    /// Three members; m1 is at OWN.
    fn three() -> RingPlanSpec {
        let mut plan = plan(6, 3, 1, &[2, 4]);
        for (rank, member) in plan.members.iter_mut().enumerate() {
            member.address = format!("10.0.0.{}:9200", 6 + rank);
        }
        plan.http_port = Some(9400);
        plan
    }

    fn no_gpu() -> Result<(), EngineError> {
        let reason = "there is none".to_owned();
        Err(EngineError::NoGpu { reason })
    }

    fn refusal(plan: &RingPlanSpec, node: &str, own: IpAddr) -> String {
        check(plan, node, own, KEY, no_gpu).unwrap_err().to_string()
    }

    #[test]
    fn a_member_learns_where_to_listen_and_rank_0_where_to_serve() {
        let order = check(&three(), "m1", OWN, KEY, no_gpu).unwrap();
        assert_eq!((order.rank, order.http), (1, None));
        assert_eq!(order.listen.to_string(), "10.0.0.7:9200");
        let own = IpAddr::from([10, 0, 0, 6]);
        let order = check(&three(), "m0", own, KEY, no_gpu).unwrap();
        assert_eq!(order.http.unwrap().to_string(), "10.0.0.6:9400");
    }

    #[test]
    fn what_is_refused_names_its_field_and_what_would_help() {
        let rank_0 = IpAddr::from([10, 0, 0, 6]);
        let refused = |change: fn(&mut RingPlanSpec), node, own| {
            let mut plan = three();
            change(&mut plan);
            refusal(&plan, node, own)
        };
        let cases = [
            (refused(|_| {}, "m9", OWN), "expected a member m9"),
            (
                refused(|_| {}, "m2", OWN),
                "members[2].address: this agent is reached at 10.0.0.7, the plan was made for 10.0.0.8",
            ),
            (
                refused(
                    |plan| plan.members[1].address = "desk:9200".into(),
                    "m1",
                    OWN,
                ),
                "members[1].address: expected IP:PORT, found \"desk:9200\"",
            ),
            (
                refused(|plan| plan.members[1].windows[0].gpu_layers = 1, "m1", OWN),
                "members[1].windows[0].gpuLayers: 1 layers on a GPU",
            ),
            (
                refused(
                    |plan| plan.members[0].output_head_on_gpu = true,
                    "m0",
                    rank_0,
                ),
                "members[0].outputHeadOnGpu: the output head on a GPU",
            ),
            (
                refused(
                    |plan| {
                        plan.members[0].draft_on_gpu = true;
                        plan.draft = Some(PlannedDraft {
                            model: plan.model.clone(),
                            memory_bytes: 0,
                        });
                    },
                    "m0",
                    rank_0,
                ),
                "members[0].draftOnGpu: the draft model on a GPU",
            ),
            (
                refused(|plan| plan.members[1].gpu_from_rows = Some(32), "m1", OWN),
                "members[1].gpuFromRows: passes of at least 32 rows on a GPU",
            ),
            (
                refused(|plan| plan.http_port = None, "m0", rank_0),
                "spec.httpPort: expected a port",
            ),
            (
                refused(|plan| plan.http_port = Some(9200), "m0", rank_0),
                "found 9200 for both",
            ),
            (
                refused(|plan| plan.members[1].windows[0].last = 5, "m1", OWN),
                "spec.members[2].windows[0]",
            ),
        ];
        for (message, expected) in cases {
            assert!(message.contains(expected), "{message}, expected {expected}");
        }
    }

    #[test]
    fn a_plan_with_keys_is_for_the_key_that_the_agent_has() {
        let mut plan = three();
        for (rank, member) in plan.members.iter_mut().enumerate() {
            member.public_key_sha256 = Some(format!("{:064x}", 10 + rank));
        }
        assert!(check(&plan, "m1", OWN, KEY, no_gpu).is_ok());
        plan.members[1].public_key_sha256 = Some("0".repeat(64));
        let problem = refusal(&plan, "m1", OWN);
        assert!(problem.contains("members[1].publicKeySha256"), "{problem}");
    }

    #[test]
    fn own_gpu_layers_take_a_gpu() {
        let mut plan = three();
        plan.members[2].windows[0].gpu_layers = 1;
        assert!(!check(&plan, "m1", OWN, KEY, no_gpu).unwrap().on_gpu);
        plan.members[1].windows[0].gpu_layers = 1;
        assert!(check(&plan, "m1", OWN, KEY, || Ok(())).unwrap().on_gpu);
    }
}
