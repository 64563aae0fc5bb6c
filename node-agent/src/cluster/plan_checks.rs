//! Whether this machine can honour a plan, as far as the plan alone tells; the rest shows when it is tried.
//!
//! Refuses a plan for another machine, address or build, and says what would help. Pure.

use std::net::{IpAddr, SocketAddr};

use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingPlanError, RingPlanSpec};

/// What a member's process is told in addition to its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchParams {
    pub rank: usize,
    /// Where the predecessor connects.
    pub listen: SocketAddr,
    /// Where rank 0 serves HTTP.
    pub http: Option<SocketAddr>,
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
        "spec.members[{rank}].address: this agent is reached at {own}, the plan was made for {planned}: its pod was made anew; plan again"
    )]
    OtherAddress {
        rank: usize,
        own: IpAddr,
        planned: IpAddr,
    },
    #[error("spec.httpPort: expected a port where rank 0 serves HTTP, found none; plan again")]
    NoHttpPort,
    #[error(
        "spec.httpPort: expected another port than the ring's at spec.members[0].address, found {port} for both; plan again"
    )]
    SamePort { port: u16 },
    #[error(
        "spec.members[{rank}].windows[{round}].gpuLayers: {gpu_layers} layers on a GPU, but this agent was built without support for GPUs; install the chart with the agent's CUDA image on this node (value agent.cuda), or plan again"
    )]
    NoGpuSupport {
        rank: usize,
        round: usize,
        gpu_layers: i32,
    },
}

/// How the agent of `node`, reached at `own`, starts its member of the plan. `gpus`: whether it was built to use GPUs.
///
/// # Errors
/// [`PlanRefused`].
pub fn check(
    plan: &RingPlanSpec,
    node: &str,
    own: IpAddr,
    gpus: bool,
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
    let on_gpu = member
        .windows
        .iter()
        .enumerate()
        .find(|(_, window)| window.gpu_layers > 0);
    if let (Some((round, window)), false) = (on_gpu, gpus) {
        return Err(PlanRefused::NoGpuSupport {
            rank,
            round,
            gpu_layers: window.gpu_layers,
        });
    }
    let http = match (rank, plan.http_port) {
        // A validated port.
        (0, Some(port)) => Some(SocketAddr::new(own, port as u16)),
        (0, None) => return Err(PlanRefused::NoHttpPort),
        _ => None,
    };
    match http {
        Some(http) if http == listen => Err(PlanRefused::SamePort { port: http.port() }),
        _ => Ok(LaunchParams { rank, listen, http }),
    }
}

/// Whether members fetch the model's file, rather than have it.
pub fn is_fetched(model: &PlannedModel) -> bool {
    let source = model.source.as_ref();
    source.is_some_and(|source| source.local_path().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::test_plan::plan;

    const OWN: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 7));

    /// Three members; m1 is at OWN.
    fn three() -> RingPlanSpec {
        let mut plan = plan(6, 3, 1, &[2, 4]);
        for (rank, member) in plan.members.iter_mut().enumerate() {
            member.address = format!("10.0.0.{}:9200", 6 + rank);
        }
        plan.http_port = Some(9400);
        plan
    }

    fn refusal(plan: &RingPlanSpec, node: &str, own: IpAddr) -> String {
        check(plan, node, own, false).unwrap_err().to_string()
    }

    #[test]
    fn a_member_learns_where_to_listen_and_rank_0_where_to_serve() {
        let order = check(&three(), "m1", OWN, false).unwrap();
        assert_eq!((order.rank, order.http), (1, None));
        assert_eq!(order.listen.to_string(), "10.0.0.7:9200");
        let own = IpAddr::from([10, 0, 0, 6]);
        let order = check(&three(), "m0", own, false).unwrap();
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
    fn own_gpu_layers_take_a_build_for_gpus() {
        let mut plan = three();
        plan.members[2].windows[0].gpu_layers = 1;
        assert!(check(&plan, "m1", OWN, false).is_ok());
        plan.members[1].windows[0].gpu_layers = 1;
        assert!(check(&plan, "m1", OWN, true).is_ok());
    }
}
