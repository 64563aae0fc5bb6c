//! What a neighbour in the ring sends: messages one after the other, each with its length in two bytes before it. The first byte says who
//! receives them: rank 0 or another, or whoever hears events.
//!
//! Finds panics, memory for what is refused, and frames that pass but break what the worker counts on.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::{Corpus, fuzz_target};
use prima_crds::v1alpha1::ring_plan::{PlannedModel, RingPlanSpec};
use prima_node_agent::ring::fuzzed::{
    FrameLimits, Operation, Schedule, SessionTable, event_from_proto, event_to_proto,
    frame_from_proto, frame_to_proto,
};
use prima_node_agent::ring::{MAX_FRAME_ROWS, proto};
use prost::Message as _;

const HIDDEN: usize = 4;
const CONTEXT: usize = 600;
const SESSIONS: usize = 16;

/// Three members in two rounds.
static PLAN: LazyLock<RingPlanSpec> = LazyLock::new(|| {
    let addresses = ["127.0.0.1:7000", "127.0.0.1:7001", "127.0.0.1:7002"].map(str::to_owned);
    let model = PlannedModel::new("fuzz", "fuzz.gguf", 1, 6);
    RingPlanSpec {
        generation: 7,
        max_concurrent_requests: 4,
        ..RingPlanSpec::cut(model, CONTEXT as i32, &addresses, &[1, 2, 3, 4, 5, 6])
    }
});

fuzz_target!(|bytes: &[u8]| -> Corpus {
    let Some((receiver, messages)) = bytes.split_first() else {
        return Corpus::Reject;
    };
    match receiver % 3 {
        2 => events(messages),
        rank => frames(usize::from(rank), messages),
    }
    Corpus::Keep
});

fn each(mut messages: &[u8], mut take: impl FnMut(&[u8])) {
    while let Some((length, rest)) = messages.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (message, others) = rest.split_at(length);
        take(message);
        messages = others;
    }
}

fn frames(rank: usize, messages: &[u8]) {
    let schedule = Schedule::new(&PLAN, rank).expect("a member");
    let limits = FrameLimits::new(&PLAN, &schedule, HIDDEN);
    let mut table = SessionTable::new(SESSIONS, CONTEXT, schedule.stages());
    each(messages, |message| {
        if message.len() > limits.max_message_bytes() {
            return;
        }
        let Ok(frame) = proto::Frame::decode(message) else {
            return;
        };
        let frame = match frame_from_proto(frame, &limits) {
            Ok(frame) => frame,
            Err(refusal) => return assert!(refusal.to_string().len() < 2000),
        };
        if let Operation::Activation(activation) = &frame.operation {
            assert!((1..=MAX_FRAME_ROWS).contains(&activation.rows));
            assert!(activation.output_rows <= activation.rows);
        }
        // Resets that came home are taken before the table.
        if frame.round < schedule.stages()
            && table.admit(&frame).is_ok()
            && let Operation::Activation(activation) = &frame.operation
        {
            assert!(activation.first_position + activation.rows <= CONTEXT);
        }
        let sent = frame_to_proto(frame, &limits).expect("no tokens");
        assert!(
            frame_from_proto(sent, &limits).is_ok(),
            "what came may go on"
        );
    });
}

fn events(messages: &[u8]) {
    each(messages, |message| {
        if let Ok(event) = proto::HopEvent::decode(message)
            && let Some(event) = event_from_proto(event)
        {
            event_to_proto(event);
        }
    });
}
