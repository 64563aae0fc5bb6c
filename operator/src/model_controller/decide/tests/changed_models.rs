//! What becomes of a ring when its Model is edited or suspended, or its file cannot be seen.

use prima_crds::v1alpha1::ring_plan::KvDtype;
use serde_json::json;

use super::*;
use crate::model_controller::test_world::{GIB, add_draft, machine, ring, world};

#[test]
fn another_kv_dtype_replaces_the_ring() {
    let desk = [machine("desk")];
    let f16 = written(decided(&world(&desk, &[])));
    let mut there = world(&desk, std::slice::from_ref(&f16));
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    Arc::get_mut(&mut there.model).unwrap().spec.kv_dtype = KvDtype::Q8_0;
    let Resolution::Done(resolved) = &mut there.resolution else {
        panic!("not resolved");
    };
    resolved.profile.quantized_kv_bytes_per_position_and_layer = 136;
    let DecisionKind::New { spec, why, .. } = decided(&there).kind else {
        panic!("the ring goes on with F16");
    };
    assert_eq!(why, "the Model was changed");
    assert_eq!(spec.kv_dtype, KvDtype::Q8_0);
    let memory = |spec: &RingPlanSpec| spec.members[0].memory_bytes.unwrap();
    // 8 layers, 512 positions.
    assert_eq!(memory(&f16.spec) - memory(&spec), 8 * 512 * (256 - 136));
}

#[test]
fn a_draft_model_is_planned_at_rank_0() {
    let desk = [machine("desk")];
    let without = written(decided(&world(&desk, &[])));
    assert_eq!(without.spec.draft, None);
    let mut there = world(&desk, std::slice::from_ref(&without));
    add_draft(&mut there, &["desk"]);
    let decision = decided(&there);
    let DecisionKind::New { spec, why, .. } = &decision.kind else {
        panic!("the ring goes on without");
    };
    assert_eq!(why, "the Model was changed");
    // 2 layers, 512 positions of 256 bytes.
    let bytes = GIB + 2 * 512 * 256;
    let draft = spec.draft.as_ref().unwrap();
    assert_eq!(draft.memory_bytes, bytes);
    let PlannedModel {
        name,
        file,
        size_bytes,
        layers,
        source,
        version,
    } = &draft.model;
    assert_eq!((&name[..], &file[..]), ("m-draft", "/models/d.gguf"));
    assert_eq!((*size_bytes, *layers), (GIB, 2));
    assert_eq!(
        (source, &version.as_ref().unwrap().header_sha256[..]),
        (&None, "d")
    );
    let memory = |spec: &RingPlanSpec| spec.members[0].memory_bytes.unwrap();
    assert_eq!(memory(spec), memory(&without.spec) + bytes);
    // A token is guessed for each that is computed.
    let speed = |spec: &RingPlanSpec| spec.predicted.unwrap().token_microseconds;
    assert!(speed(spec) > speed(&without.spec));

    let drafting = written(decision);
    there.plans = vec![drafting];
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    // Another one is another ring.
    let Resolution::Done(resolved) = &mut there.resolution else {
        panic!("not resolved");
    };
    resolved.draft.as_mut().unwrap().version.etag = Some("new".to_owned());
    assert!(matches!(decided(&there).kind, DecisionKind::New { .. }));
}

#[test]
fn suspension_then_a_missing_key_come_before_all_else() {
    let mut there = world(&[], &[ring(&[(0, 8)], GIB, 0)]);
    there.resolution = Resolution::Failed("no".to_owned());
    there.api_keys = KnownApiKeys::Missing("no Secret".to_owned());
    let reason = |world: &World| match decided(world).kind {
        DecisionKind::Released { reason, .. } => reason,
        _ => "it is not released",
    };
    assert_eq!(reason(&there), "NoApiKey");
    Arc::get_mut(&mut there.model).unwrap().spec.suspend = true;
    assert_eq!(reason(&there), "Suspended");
}

#[test]
fn a_ring_survives_an_unseen_source_and_not_an_edit() {
    let mut there = world(&[], &[ring(&[(0, 8)], GIB, 0)]);
    there.resolution = Resolution::Failed("the server is away".to_owned());
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    there.plans.clear();
    assert_eq!(impossible(&decided(&there)).0, "NotResolved");
    there.plans = vec![ring(&[(0, 8)], GIB, 0)];
    let source = json!({"hostPath": {"path": "/models/another.gguf"}});
    Arc::get_mut(&mut there.model).unwrap().spec.source = serde_json::from_value(source).unwrap();
    assert_eq!(impossible(&decided(&there)).0, "NotResolved");

    let source = |file: &str| {
        let source = json!({"huggingFace": {"repo": "a/b", "file": file}});
        serde_json::from_value::<ModelSource>(source).unwrap()
    };
    let mut plan = RingPlan::clone(&ring(&[(0, 8)], GIB, 0));
    plan.spec.model.source = Some(source("m.gguf"));
    there.plans = vec![Arc::new(plan)];
    let mut wants = |file: &str| {
        Arc::get_mut(&mut there.model).unwrap().spec.source = source(file);
        decided(&there)
    };
    assert!(matches!(wants("m.gguf").kind, DecisionKind::Keep(_)));
    assert_eq!(impossible(&wants("other.gguf")).0, "NotResolved");
}

#[test]
fn a_ring_with_another_rank_0_than_wanted_ends() {
    let first = decided(&world(&[machine("desk")], &[]));
    let mut first = written(first);
    Arc::make_mut(&mut first).spec.generation = 5;
    let mut there = world(&[machine("desk"), machine("pi4")], &[first]);
    let want = |there: &mut World, name: &str| {
        Arc::get_mut(&mut there.model).unwrap().spec.rank0 = Some(name.to_owned());
    };
    want(&mut there, "desk");
    assert!(matches!(decided(&there).kind, DecisionKind::Keep(_)));
    want(&mut there, "pi4");
    let DecisionKind::New { spec, why, .. } = decided(&there).kind else {
        panic!("it goes on");
    };
    assert_eq!(why, "spec.rank0 is pi4 now");
    assert_eq!(spec.generation, 6);
    assert_eq!(spec.members[0].name, "pi4");
}
