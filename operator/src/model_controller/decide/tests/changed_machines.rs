//! What becomes of a ring whose machine leaves, is reached elsewhere, or loses its GPU.

use std::slice;

use prima_crds::v1alpha1::node_profile::GpuProfile;

use super::*;
use crate::cluster::world::Machine;
use crate::model_controller::test_world::{GIB, add_draft, gpu, machine, profile, world};

#[test]
fn a_machine_that_leaves_is_replaced_where_that_costs_nothing() {
    let mut desk = machine("desk");
    let first = written(decided(&world(slice::from_ref(&desk), &[])));
    desk.leaving = true;
    // Alone, it serves as long as it does.
    let alone = world(slice::from_ref(&desk), slice::from_ref(&first));
    assert!(matches!(decided(&alone).kind, DecisionKind::Keep(_)));
    let both = [desk, machine("pi4")];
    let DecisionKind::New {
        spec, retire_first, ..
    } = decided(&world(&both, slice::from_ref(&first))).kind
    else {
        panic!("no ring without it");
    };
    assert!(!retire_first);
    assert_eq!(spec.members[0].name, "pi4");
    // A ring that also lies on the other machine leaves no room for the next one.
    let mut wide = RingPlan::clone(&first);
    let mut other = wide.spec.members[0].clone();
    other.name = "pi4".to_owned();
    other.memory_bytes = Some(14 * GIB);
    for window in &mut other.windows {
        (window.first, window.last) = (window.last, window.last);
    }
    wide.spec.members.push(other);
    let crowded = world(&both, &[Arc::new(wide)]);
    assert!(matches!(decided(&crowded).kind, DecisionKind::Keep(_)));
    // Nor is there another one where the other machine cannot have it.
    let [desk, mut small] = both;
    let owner = &mut profile(&mut small).spec;
    (owner.memory_cap_bytes, owner.disk_allowed) = (Some(1), Some(false));
    let lacking = world(&[desk, small], slice::from_ref(&first));
    assert!(matches!(decided(&lacking).kind, DecisionKind::Keep(_)));
}

#[test]
fn a_ring_that_moved_keeps_its_layers_and_asks_nobody() {
    let first = decided(&world(&[machine("desk")], &[]));
    let mut first = written(first);
    Arc::make_mut(&mut first).spec.rounds = 2;
    let mut desk = machine("desk");
    let agent = profile(&mut desk)
        .status
        .as_mut()
        .unwrap()
        .agent
        .as_mut()
        .unwrap();
    agent.address = "fd00::7".to_owned();
    let (decision, _) = decide(
        &world(&[desk], slice::from_ref(&first)),
        &State::default(),
        Instant::now(),
    );
    let DecisionKind::New { spec, why, .. } = decision.kind else {
        panic!("it is not decided without the planner");
    };
    assert_eq!(why, "desk has another address now");
    assert_eq!(spec.members[0].address, "[fd00::7]:9201");
    assert_eq!(spec.members[0].windows, first.spec.members[0].windows);
    assert_eq!(spec.predicted, first.spec.predicted);
    assert_eq!(spec.rounds, 2);
}

/// Rows as wide as layers of this size have, for which a GPU needs buffers.
fn with_wide_rows(mut world: World) -> World {
    if let Resolution::Done(resolved) = &mut world.resolution {
        resolved.profile.hidden_size = 4096;
    }
    world
}

#[test]
fn an_agent_of_before_is_not_told_of_a_draft_on_its_gpu() {
    let desk = |reads_gpus: bool, runs_drafts: bool, address: &str| {
        let mut desk = machine("desk");
        let status = profile(&mut desk).status.as_mut().unwrap();
        (status.gpus, status.reads_gpus) = (vec![gpu(64 * GIB)], reads_gpus);
        status.gpus[0].measured.as_mut().unwrap().runs_drafts = runs_drafts;
        status.agent.as_mut().unwrap().address = address.to_owned();
        desk
    };
    let drafting = |desk: Machine, plans: &[Arc<RingPlan>]| {
        let mut there = world(&[desk], plans);
        add_draft(&mut there, &["desk"]);
        with_wide_rows(there)
    };
    let before = written(decided(&drafting(desk(true, true, "10.0.0.1"), &[])));
    assert!(before.spec.members[0].draft_on_gpu);
    for (reads_gpus, runs_drafts) in [(true, true), (true, false), (false, true)] {
        let moved = desk(reads_gpus, runs_drafts, "10.0.0.9");
        let moved = drafting(moved, slice::from_ref(&before));
        let next = written(decided(&moved));
        let expected = reads_gpus && runs_drafts;
        assert_eq!(next.spec.members[0].draft_on_gpu, expected);
    }
}

#[test]
fn a_gpu_that_fails_is_planned_around_and_comes_back() {
    fn gpu_of(machine: &mut Machine) -> &mut GpuProfile {
        &mut profile(machine).status.as_mut().unwrap().gpus[0]
    }
    fn world_of(desk: &Machine, plans: &[Arc<RingPlan>]) -> World {
        with_wide_rows(world(slice::from_ref(desk), plans))
    }
    let mut desk = machine("desk");
    profile(&mut desk).status.as_mut().unwrap().gpus = vec![gpu(6 * GIB)];
    let with = written(decided(&world_of(&desk, &[])));
    assert!(with.spec.members[0].uses_gpu());
    let there = world_of(&desk, slice::from_ref(&with));
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));

    let failed = gpu_of(&mut desk);
    let measured = failed.measured.take();
    failed.unusable = Some("it hangs".to_owned());
    let there = world_of(&desk, slice::from_ref(&with));
    let DecisionKind::New { spec, why, .. } = decided(&there).kind else {
        panic!("the ring waits for the GPU");
    };
    assert_eq!(
        why,
        "the GPU of desk cannot be used any more: GPU: it hangs"
    );
    let member = &spec.members[0];
    assert!(!member.uses_gpu());
    let said = member.why.as_deref().unwrap();
    let when_planned = "; its GPU could not be used when this was planned: GPU: it hangs";
    assert!(said.ends_with(when_planned), "{said}");

    let without = Arc::new(RingPlan::new("m-2", *spec));
    let there = world_of(&desk, slice::from_ref(&without));
    assert!(matches!(decided_later(&there).kind, DecisionKind::Keep(_)));
    let back = gpu_of(&mut desk);
    (back.measured, back.unusable) = (measured, None);
    let there = world_of(&desk, slice::from_ref(&without));
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    let DecisionKind::New { spec, .. } = decided_later(&there).kind else {
        panic!("the GPU is not used again");
    };
    assert!(spec.members[0].uses_gpu());
}

#[test]
fn a_gpu_that_lacks_the_format_now_is_planned_around() {
    let mut desk = machine("desk");
    profile(&mut desk).status.as_mut().unwrap().gpus = vec![gpu(6 * GIB)];
    let there = |desk: &Machine, plans: &[Arc<RingPlan>]| {
        with_wide_rows(world(slice::from_ref(desk), plans))
    };
    let with = written(decided(&there(&desk, &[])));
    assert!(with.spec.members[0].uses_gpu());
    let own = &mut profile(&mut desk).status.as_mut().unwrap().gpus[0];
    own.measured.as_mut().unwrap().throughput[0].format = "Q8_0".to_owned();
    let DecisionKind::New { spec, why, .. } = decided(&there(&desk, &[with])).kind else {
        panic!("the ring waits for the GPU");
    };
    assert_eq!(
        why,
        "the GPU of desk cannot be used any more: it has none for this model"
    );
    assert!(!spec.members[0].uses_gpu());
}

/// One whose agent reads which GPUs of it a plan names.
fn with_two_gpus() -> Machine {
    let mut desk = machine("desk");
    let gpus = ["0000:01:00.0", "0000:02:00.0"].map(|address| GpuProfile {
        pci_address: Some(address.to_owned()),
        ..gpu(6 * GIB)
    });
    let status = profile(&mut desk).status.as_mut().unwrap();
    (status.gpus, status.reads_gpus) = (gpus.to_vec(), true);
    desk
}

#[test]
fn an_agent_of_before_is_not_told_which_gpus_it_uses() {
    let desk = |reads_gpus: bool, address: &str| {
        let mut desk = with_two_gpus();
        let status = profile(&mut desk).status.as_mut().unwrap();
        status.reads_gpus = reads_gpus;
        status.agent.as_mut().unwrap().address = address.to_owned();
        desk
    };
    let before = written(decided(&with_wide_rows(world(
        &[desk(true, "10.0.0.1")],
        &[],
    ))));
    assert!(!before.spec.members[0].gpus.is_empty());
    for reads_gpus in [true, false] {
        let moved = with_wide_rows(world(
            &[desk(reads_gpus, "10.0.0.9")],
            slice::from_ref(&before),
        ));
        let next = written(decided(&moved));
        let member = &next.spec.members[0];
        assert!(member.uses_gpu());
        assert_eq!(member.gpus.is_empty(), !reads_gpus);
    }
}

/// It reads the whole plan.
#[test]
fn an_agent_of_before_is_not_told_which_gpus_another_uses() {
    let mut desk = with_two_gpus();
    let mut before = written(decided(&with_wide_rows(world(slice::from_ref(&desk), &[]))));
    let members = &mut Arc::make_mut(&mut before).spec.members;
    let mut windows = members[0].windows.clone();
    for window in &mut windows {
        (window.first, window.gpu_layers) = (window.last, 0);
    }
    let address = members[0].address.clone();
    members.push(RingMember::new("pi4".to_owned(), address, windows));
    assert!(!before.spec.members[0].gpus.is_empty());
    let status = profile(&mut desk).status.as_mut().unwrap();
    status.agent.as_mut().unwrap().address = "10.0.0.9".to_owned();
    for reads_gpus in [true, false] {
        let mut other = machine("pi4");
        profile(&mut other).status.as_mut().unwrap().reads_gpus = reads_gpus;
        let there = world(&[desk.clone(), other], slice::from_ref(&before));
        let next = written(decided(&with_wide_rows(there)));
        let mut members = next.spec.members.iter();
        let named = members.any(|member| !member.gpus.is_empty());
        assert_eq!(named, reads_gpus);
    }
}

#[test]
fn an_agent_of_before_is_not_told_of_larger_chunks() {
    let mut before = written(decided(&world(&[machine("desk")], &[])));
    assert_eq!(before.spec.chunk_positions, 128);
    Arc::make_mut(&mut before).spec.chunk_positions = 512;
    let there = world(&[machine("desk")], slice::from_ref(&before));
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    for (reads, positions) in [(true, 512), (false, 128)] {
        let mut desk = machine("desk");
        let status = profile(&mut desk).status.as_mut().unwrap();
        status.reads_chunk_positions = reads;
        status.agent.as_mut().unwrap().address = "10.0.0.9".to_owned();
        let next = written(decided(&world(&[desk], slice::from_ref(&before))));
        assert_eq!(next.spec.chunk_positions, positions);
    }
}

/// Has the first of two GPUs fail: the ring of `before` is planned again at once, with the other.
fn the_second_goes_on(mut desk: Machine, before: &Arc<RingPlan>) {
    let failed = &mut profile(&mut desk).status.as_mut().unwrap().gpus[0];
    (failed.measured, failed.unusable) = (None, Some("it hangs".to_owned()));
    let there = with_wide_rows(world(slice::from_ref(&desk), slice::from_ref(before)));
    let DecisionKind::New { spec, why, .. } = decided(&there).kind else {
        panic!("the ring waits for the GPU");
    };
    assert_eq!(
        why,
        "the GPU of desk cannot be used any more: GPU: it hangs"
    );
    let names = spec.members[0].gpus.iter().map(|gpu| gpu.name.as_str());
    assert_eq!(names.collect::<Vec<_>>(), ["0000:02:00.0"]);
}

#[test]
fn of_two_gpus_the_other_goes_on_when_one_fails() {
    let desk = with_two_gpus();
    let both = written(decided(&with_wide_rows(world(slice::from_ref(&desk), &[]))));
    assert_eq!(both.spec.members[0].gpus[0].name, "0000:01:00.0");
    the_second_goes_on(desk, &both);
}

#[test]
fn a_ring_that_names_no_gpu_is_planned_again_without_the_first() {
    let mut desk = with_two_gpus();
    profile(&mut desk).status.as_mut().unwrap().reads_gpus = false;
    let before = written(decided(&with_wide_rows(world(slice::from_ref(&desk), &[]))));
    let member = &before.spec.members[0];
    assert!(member.uses_gpu() && member.gpus.is_empty());
    profile(&mut desk).status.as_mut().unwrap().reads_gpus = true;
    the_second_goes_on(desk, &before);
}
