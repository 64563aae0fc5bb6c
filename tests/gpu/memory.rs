//! Whether a GPU refuses more than its memory by name, and computes on afterwards. A driver may lend the processor's memory instead (amdgpu does), but
//! no buffer that kernels do not see at once.

use std::path::Path;

use prima_crds::error_chain;
use prima_engine::{EngineError, GpuApi, KvPositions, LayerDevices, LayerWindow};

use crate::engine::Engine;
use crate::error::CheckError;
use crate::machine::Machine;

/// By so many windows its memory is filled; of its own it never has twice as many.
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

    let lends = machine.facts.api == GpuApi::Vulkan;
    let refused_or_lent = |opened, asked| -> Result<String, CheckError> {
        match named(opened)? {
            Some(refusal) => Ok(format!("refused: {refusal}")),
            None if lends => Ok("lent, of the processor's memory".to_owned()),
            None => Err(CheckError::NotRefused { asked, total }),
        }
    };
    let at_once = refused_or_lent(with_room(4 * total), 4 * total)?;
    let mut told = format!("four times as much at once is {at_once}");
    if let Some(most) = machine.facts.most_buffer_bytes {
        let asked = 2 * most * engine.layers();
        let Some(refusal) = named(with_room(asked))? else {
            return Err(CheckError::NotRefused { asked, total });
        };
        told += &format!("; more than buffers have is refused: {refusal}");
    }
    // Memory that is the processor's may be promised though it is not there.
    if !machine.facts.unified_memory {
        let mut windows = Vec::new();
        let last = loop {
            let asked = (windows.len() as u64 + 1) * total / PARTS;
            match with_room(total / PARTS) {
                Ok(window) if windows.len() as u64 <= 2 * PARTS => windows.push(window),
                last => break refused_or_lent(last, asked)?,
            }
        };
        same(&engine, &tokens, &before)?;
        told += &format!("; behind {} windows more is {last}", windows.len());
    }
    same(&engine, &tokens, &before)?;
    same(&Engine::open(model, Some(&machine.gpu))?, &tokens, &before)?;
    Ok(told + "; it computes on")
}

/// The refusal's message, if it was refused.
fn named(opened: Result<LayerWindow, EngineError>) -> Result<Option<String>, CheckError> {
    let Err(error) = opened else {
        return Ok(None);
    };
    let message = error_chain(&error);
    match message.contains("memory is full") {
        true => Ok(Some(message)),
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
