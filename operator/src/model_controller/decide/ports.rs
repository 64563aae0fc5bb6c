//! The ports of a plan: a pair that no other plan has, from the ranges that the chart opens.

use std::collections::HashSet;

use crate::model_controller::dereference::World;

/// First ports: of members, and of rank 0's HTTP.
const RING: i32 = 9200;
const HTTP: i32 = 9400;
pub const SLOTS: i32 = 200;

/// A pair of ports that no plan uses.
pub fn free_slot(world: &World) -> Option<i32> {
    let plans = world.plans.iter().chain(&world.others);
    let used: HashSet<i32> = plans
        .filter_map(|plan| Some(plan.spec.http_port? - HTTP))
        .collect();
    (0..SLOTS).find(|slot| !used.contains(slot))
}

pub fn none_left() -> String {
    format!("all {SLOTS} ring ports are in use; delete or suspend other Models")
}

/// Where a member of the plan with these ports is reached.
pub fn ring_address(host: &str, slot: i32) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{}", RING + slot),
        false => format!("{host}:{}", RING + slot),
    }
}

pub fn http(slot: i32) -> i32 {
    HTTP + slot
}
