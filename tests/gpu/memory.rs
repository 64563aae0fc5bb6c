//! Whether a GPU refuses more than its memory by name, and computes on afterwards.

use std::path::Path;

use prima_crds::error_chain;
use prima_engine::{EngineError, KvPositions, LayerDevices, LayerWindow};

use crate::engine::Engine;
use crate::error::CheckError;
use crate::machine::Machine;

/// Into so many windows its memory is filled; twice as many are never there.
const PARTS: u64 = 16;
/// How far logits of the same pass may differ, in units of the largest.
const SAME: f32 = 1e-3;

pub fn check(machine: &Machine, model: &Path) -> Result<String, CheckError> {
    let total = machine.facts.total_bytes;
    let all = LayerDevices::last_on(usize::MAX, machine.gpu.clone());
    let engine = Engine::open(model, Some(&machine.gpu))?;
    let tokens = engine.tokens(40);
    let before = engine.last_logits(&tokens)?;
    let with_room = |bytes: u64| {
        let positions = (bytes / engine.position_bytes()) as usize;
        engine.window(&all.clone().with_kv_positions(KvPositions {
            full: positions,
            windowed: positions,
        }))
    };

    let refusal = named(with_room(4 * total), 4 * total, total)?;
    let mut told = format!("refused at once: {refusal}");
    // Memory that is the processor's may be promised though it is not there.
    if !machine.facts.unified_memory {
        let mut windows = Vec::new();
        let refusal = loop {
            let asked = (windows.len() as u64 + 1) * total / PARTS;
            match with_room(total / PARTS) {
                Ok(window) if windows.len() as u64 <= 2 * PARTS => windows.push(window),
                last => break named(last, asked, total)?,
            }
        };
        same(&engine, &tokens, &before)?;
        told += &format!("; filled by {} windows: {refusal}", windows.len());
    }
    same(&engine, &tokens, &before)?;
    same(&Engine::open(model, Some(&machine.gpu))?, &tokens, &before)?;
    Ok(told + "; it computes on")
}

/// The refusal's message.
fn named(
    opened: Result<LayerWindow, EngineError>,
    asked: u64,
    total: u64,
) -> Result<String, CheckError> {
    let Err(error) = opened else {
        return Err(CheckError::NotRefused { asked, total });
    };
    let message = error_chain(&error);
    match message.contains("memory is full") {
        true => Ok(message),
        false => Err(CheckError::Unnamed { message }),
    }
}

fn same(engine: &Engine, tokens: &[u32], before: &[f32]) -> Result<(), CheckError> {
    let after = engine.last_logits(tokens)?;
    let apart = before.iter().zip(&after).map(|(a, b)| (a - b).abs());
    let largest = before
        .iter()
        .fold(0.0_f32, |most, logit| most.max(logit.abs()));
    let difference = apart.fold(0.0, f32::max) / largest;
    // Also of a NaN.
    match difference < SAME {
        true => Ok(()),
        false => Err(CheckError::Damaged { difference }),
    }
}
