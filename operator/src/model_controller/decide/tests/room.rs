//! Memory, ports and quotas: what a ring takes, and where there is none left.

use prima_crds::v1alpha1::node_profile::{GpuBackend, GpuProfile, NodeProfile};
use prima_crds::v1alpha1::ring_plan::PlannedGpu;
use serde_json::json;

use super::*;
use crate::model_controller::decide::memory::{could_do, fits_beside};
use crate::model_controller::decide::ports::{SLOTS, free_slot, http};
use crate::model_controller::test_world::{GIB, gpu, machine, model, profile, ring, world};

/// Whether there is memory for the new ring beside the old one.
fn fits_on(desk: &NodeProfile, new: &Arc<RingPlan>, old: &Arc<RingPlan>) -> bool {
    let (_, resolved) = model();
    let candidates = Candidates {
        profiles: vec![desk.clone()],
        ..Candidates::default()
    };
    fits_beside(
        &new.spec,
        std::slice::from_ref(old),
        &candidates,
        &resolved.profile,
    )
}

#[test]
fn a_ring_fits_beside_another_but_for_layers_that_both_have() {
    let mut desk = machine("desk");
    let status = profile(&mut desk).status.as_mut().unwrap();
    status.memory.available_bytes = 8 * GIB;
    status.gpus = vec![gpu(6 * GIB)];
    let desk = profile(&mut desk);
    let fits = |new: &Arc<RingPlan>, old: &Arc<RingPlan>| fits_on(desk, new, old);
    let new = ring(&[(0, 4)], 4 * GIB, 0);
    assert!(fits(&new, &ring(&[(4, 8)], 4 * GIB, 0)), "just");
    assert!(
        !fits(&new, &ring(&[(4, 8)], 4 * GIB + 1, 0)),
        "a byte too much"
    );
    assert!(
        fits(&new, &ring(&[(0, 2), (2, 4)], 8 * GIB, 0)),
        "the same layers"
    );
    assert!(!fits(&new, &ring(&[(0, 2), (2, 4)], 8 * GIB + 1, 0)));
    assert!(
        !fits(&new, &ring(&[(3, 8)], 5 * GIB + 1, 0)),
        "one layer is the same"
    );
    assert!(fits(&new, &ring(&[(3, 8)], 5 * GIB, 0)));
    // Layers of another file are others.
    let other = |bytes| of_another_file(&ring(&[(0, 4)], bytes, 0));
    assert!(fits(&new, &other(4 * GIB)));
    assert!(!fits(&new, &other(4 * GIB + 1)));
    // A GPU holds both rings in full.
    let new = ring(&[(0, 4)], 0, 3 * GIB);
    assert!(fits(&new, &ring(&[(0, 4)], 0, 3 * GIB)));
    assert!(!fits(&new, &ring(&[(0, 4)], 0, 3 * GIB + 1)));
    assert!(fits(&ring(&[(0, 4)], 0, 0), &ring(&[(0, 4)], 0, 9 * GIB)));
}

/// The same ring of another file.
fn of_another_file(plan: &Arc<RingPlan>) -> Arc<RingPlan> {
    let mut plan = RingPlan::clone(plan);
    let version = plan.spec.model.version.as_mut().unwrap();
    version.header_sha256 = "1".to_owned();
    Arc::new(plan)
}

#[test]
fn a_ring_that_reads_from_disk_makes_room() {
    let mut desk = machine("desk");
    profile(&mut desk)
        .status
        .as_mut()
        .unwrap()
        .memory
        .available_bytes = 5 * GIB;
    let desk = profile(&mut desk);
    let reads = |plan: Arc<RingPlan>, bytes| {
        let mut plan = RingPlan::clone(&plan);
        plan.spec.members[0].read_bytes_per_token = Some(bytes);
        Arc::new(plan)
    };
    // All but its 8 layers stays: 2 GiB.
    let old = reads(ring(&[(0, 8)], 10 * GIB, 0), 5 * GIB);
    let new = |bytes| ring(&[(4, 8)], bytes, 0);
    assert!(fits_on(desk, &new(7 * GIB), &old), "3 GiB are no layers");
    assert!(!fits_on(desk, &new(7 * GIB + 1), &old), "a byte too much");
    // Layers on a GPU are in its memory.
    let mut on_gpu = RingPlan::clone(&old);
    on_gpu.spec.members[0].windows[0].gpu_layers = 1;
    assert!(!fits_on(desk, &new(7 * GIB), &Arc::new(on_gpu)));
    // How large the layers of another file are is not known: all that it has may stay.
    assert!(!fits_on(desk, &new(GIB), &of_another_file(&old)));

    // A ring that reads nothing from disk is not made to.
    let old = ring(&[(0, 4)], 4 * GIB, 0);
    let new = ring(&[(0, 6)], 6 * GIB, 0);
    assert!(!fits_on(desk, &new, &old));
    assert!(fits_on(desk, &reads(new.clone(), GIB), &old));
    assert!(!fits_on(desk, &reads(new, GIB - 1), &old));
    // On a machine that the old ring does not have, the new one is as it was planned.
    let mut elsewhere = RingPlan::clone(&old);
    elsewhere.spec.members[0].name = "pi4".to_owned();
    let new = reads(ring(&[(0, 8)], 9 * GIB, 0), GIB);
    assert!(fits_on(desk, &new, &Arc::new(elsewhere)));
}

#[test]
fn ports_are_used_once_and_end_some_time() {
    let with_port = |slot: i32| {
        let mut plan = RingPlan::clone(&ring(&[(0, 8)], 0, 0));
        plan.spec.http_port = Some(http(slot));
        Arc::new(plan)
    };
    let mut there = world(&[], &[with_port(0)]);
    assert_eq!(free_slot(&there), Some(1));
    there.others = (1..SLOTS)
        .filter(|slot| *slot != 7)
        .map(with_port)
        .collect();
    assert_eq!(free_slot(&there), Some(7));
    there.others.push(with_port(7));
    assert_eq!(free_slot(&there), None);
    // A plan without ports takes none.
    there.plans = vec![ring(&[(0, 8)], 0, 0)];
    assert_eq!(free_slot(&there), Some(0));
}

#[test]
fn without_ports_or_room_it_says_so_and_a_working_ring_goes_on() {
    let desk = [machine("desk")];
    let with_port = |slot: i32| {
        let mut plan = RingPlan::clone(&ring(&[(0, 8)], 0, 0));
        plan.spec.http_port = Some(http(slot));
        plan.spec.members.clear();
        Arc::new(plan)
    };
    let mut there = world(&desk, &[]);
    there.others = (0..SLOTS).map(with_port).collect();
    let decision = decided(&there);
    let (reason, message) = impossible(&decision);
    assert_eq!(reason, "NoPorts");
    assert!(message.contains("200 ring ports"), "{message}");

    let mut plan = RingPlan::clone(&written(decided(&world(&desk, &[]))));
    plan.spec.predicted = speed(i64::MAX / 1000);
    there.plans = vec![Arc::new(plan)];
    assert!(matches!(decided_later(&there).kind, DecisionKind::Keep(_)));

    let mut desk = machine("desk");
    let owner = &mut profile(&mut desk).spec;
    owner.memory_cap_bytes = Some(1);
    owner.disk_allowed = Some(false);
    assert_eq!(impossible(&decided(&world(&[desk], &[]))).0, "DoesNotFit");
}

#[test]
fn a_quota_refuses_a_new_ring_and_ends_none() {
    let desk = [machine("desk")];
    let mut there = world(&desk, &[]);
    Arc::get_mut(&mut there.model).unwrap().metadata.namespace = Some("kids".to_owned());
    let quota =
        json!({"metadata": {"name": "home"}, "spec": {"hard": {"prima.dev/memory": "1Gi"}}});
    there.quotas = vec![Arc::new(serde_json::from_value(quota).unwrap())];
    let decision = decided(&there);
    let (reason, message) = impossible(&decision);
    assert_eq!(reason, "OverQuota");
    assert!(message.contains("may take 1.0 GiB"), "{message}");

    // One that runs goes on, but has to stay as it is.
    let quotas = std::mem::take(&mut there.quotas);
    let plan = written(decided(&there));
    there.plans = vec![plan];
    there.quotas = quotas;
    assert!(matches!(decided_later(&there).kind, DecisionKind::Keep(_)));
    let model = Arc::get_mut(&mut there.model).unwrap();
    model.spec.context_length = Some(128);
    assert_eq!(impossible(&decided(&there)).0, "OverQuota");
}

#[test]
fn only_the_namespaces_own_models_count_for_its_quota() {
    let desk = [machine("desk")];
    let mut there = world(&desk, &[]);
    Arc::get_mut(&mut there.model).unwrap().metadata.namespace = Some("kids".to_owned());
    let needed = written(decided(&there)).spec.members[0]
        .memory_bytes
        .unwrap();
    let hard = json!({"prima.dev/memory": (needed + GIB).to_string()});
    let quota = json!({"metadata": {"name": "home"}, "spec": {"hard": hard}});
    there.quotas = vec![Arc::new(serde_json::from_value(quota).unwrap())];
    // On a machine that is not there any more, so that it takes nothing of the other one.
    let mut other = RingPlan::clone(&ring(&[(0, 8)], 2 * GIB, 0));
    other.spec.members[0].name = "gone".to_owned();
    other.metadata.namespace = Some("parents".to_owned());
    there.others = vec![Arc::new(other.clone())];
    assert!(matches!(decided(&there).kind, DecisionKind::New { .. }));
    other.metadata.namespace = Some("kids".to_owned());
    there.others = vec![Arc::new(other)];
    assert_eq!(impossible(&decided(&there)).0, "OverQuota");
}

#[test]
fn a_machine_goes_on_elsewhere_only_with_what_it_needs() {
    let (_, resolved) = model();
    let yaml = include_str!("../../../../../crds/tests/node-profile.yaml");
    let mut profile = NodeProfile::from_yaml("node-profile.yaml", yaml).unwrap();
    let status = profile.status.as_mut().unwrap();
    status.memory.available_bytes = 5 * GIB;
    status.gpus.clear();
    assert!(could_do(&profile, &member(), &resolved.profile));

    let mut reserved = profile.clone();
    reserved.spec.reserved_memory_bytes = Some(2 * GIB);
    assert!(!could_do(&reserved, &member(), &resolved.profile));
    let mut capped = profile.clone();
    capped.spec.memory_cap_bytes = Some(3 * GIB);
    assert!(!could_do(&capped, &member(), &resolved.profile));

    let on_gpu = RingMember {
        gpu_memory_bytes: Some(GIB),
        ..member()
    };
    assert!(
        !could_do(&profile, &on_gpu, &resolved.profile),
        "there is no GPU any more"
    );

    let streamed = RingMember {
        memory_bytes: Some(8 * GIB),
        read_bytes_per_token: Some(4 * GIB),
        ..member()
    };
    assert!(could_do(&profile, &streamed, &resolved.profile));
    profile.spec.disk_allowed = Some(false);
    assert!(!could_do(&profile, &streamed, &resolved.profile));
}

#[test]
fn what_is_no_layer_has_to_fit_the_first_of_two_gpus() {
    let (_, resolved) = model();
    let mut desk = machine("desk");
    let gpus = [("0000:01:00.0", GIB), ("0000:02:00.0", 6 * GIB)];
    let status = profile(&mut desk).status.as_mut().unwrap();
    status.gpus = gpus
        .map(|(address, bytes)| GpuProfile {
            pci_address: Some(address.to_owned()),
            ..gpu(bytes)
        })
        .to_vec();
    let fits = |bytes: i64, desk: &NodeProfile| {
        let gpus = gpus.map(|(address, _)| PlannedGpu {
            name: address.to_owned(),
            beside_layers_bytes: bytes,
        });
        let member = RingMember {
            gpu_memory_bytes: Some(4 * GIB),
            gpus: gpus.to_vec(),
            ..member()
        };
        could_do(desk, &member, &resolved.profile)
    };
    assert!(fits(GIB, profile(&mut desk)));
    assert!(!fits(GIB + 1, profile(&mut desk)));
}

/// On which of the two the other ring lies is not known.
#[test]
fn what_is_no_layer_fits_beside_what_another_ring_has() {
    let mut desk = machine("desk");
    let addresses = ["0000:01:00.0", "0000:02:00.0"];
    let status = profile(&mut desk).status.as_mut().unwrap();
    status.gpus = addresses
        .map(|address| GpuProfile {
            pci_address: Some(address.to_owned()),
            ..gpu(6 * GIB)
        })
        .to_vec();
    let desk = profile(&mut desk);
    let fits = |beside_layers_bytes: i64| {
        let mut new = RingPlan::clone(&ring(&[(0, 4)], 0, 5 * GIB));
        let gpus = addresses.map(|address| PlannedGpu {
            name: address.to_owned(),
            beside_layers_bytes,
        });
        new.spec.members[0].gpus = gpus.to_vec();
        fits_on(desk, &Arc::new(new), &ring(&[(4, 8)], 0, 2 * GIB))
    };
    assert!(fits(4 * GIB));
    assert!(!fits(4 * GIB + 1));
}

/// Layers of 1 GiB on a GPU of which a driver says that it may have so much of the machine's memory. Each ring has its own copies there.
#[test]
fn rings_on_a_gpu_that_shares_memory_share_what_it_is_lent() {
    let on_gpu = |first: i32, bytes: i64| {
        let mut plan = RingPlan::clone(&ring(&[(first, first + 3)], bytes, 0));
        plan.spec.members[0].windows[0].gpu_layers = 3;
        Arc::new(plan)
    };
    let with = |available: i64, lent: i64| {
        let mut desk = machine("desk");
        let desk = profile(&mut desk);
        let status = desk.status.as_mut().unwrap();
        status.memory.available_bytes = available;
        status.gpus = vec![GpuProfile {
            backend: GpuBackend::Vulkan,
            ..gpu(lent)
        }];
        let measured = status.gpus[0].measured.as_mut().unwrap();
        measured.unified_memory = true;
        desk.clone()
    };
    let new = on_gpu(0, 3 * GIB);
    let fits = |desk: &NodeProfile, old: &Arc<RingPlan>| fits_on(desk, &new, old);
    for old in [on_gpu(0, 3 * GIB), on_gpu(3, 3 * GIB)] {
        assert!(fits(&with(6 * GIB, 6 * GIB), &old));
        assert!(!fits(&with(6 * GIB - 1, 6 * GIB), &old));
        assert!(!fits(&with(6 * GIB, 6 * GIB - 1), &old));
    }
    // What the processor has is not lent; how large the layers of another file are is not known.
    let ample = with(12 * GIB, 6 * GIB);
    assert!(fits(&ample, &ring(&[(3, 8)], 5 * GIB, 0)));
    assert!(fits(&ample, &of_another_file(&on_gpu(0, 3 * GIB))));
    assert!(!fits(&ample, &of_another_file(&on_gpu(0, 3 * GIB + 1))));

    // Half of the KV caches are there, too.
    let (_, resolved) = model();
    let mut moved = member();
    (moved.windows[0].gpu_layers, moved.kv_bytes) = (4, Some(GIB));
    let could = |lent: i64| could_do(&with(12 * GIB, lent), &moved, &resolved.profile);
    assert!(could(4 * GIB + GIB / 2));
    assert!(!could(4 * GIB + GIB / 2 - 1));
}
