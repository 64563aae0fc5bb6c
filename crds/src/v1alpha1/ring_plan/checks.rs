//! What an executor relies on in a RingPlan: the checks of its numbers, models, members and windows.

use std::collections::HashSet;

use super::super::document::{self, DocumentError};
use super::{CHUNK_POSITIONS, MOST_CHUNK_POSITIONS, PlannedWindow, RingPlanSpec};

/// Why a document is not a valid plan.
#[derive(Debug, thiserror::Error)]
pub enum RingPlanError {
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("RingPlan field {field}: {problem}")]
    Field { field: String, problem: String },
}

/// Bounds that keep a hostile plan from asking for absurd allocations.
const MAX_MEMBERS: usize = 256;
const MAX_GPUS: i64 = 64;
const MAX_ROUNDS: i32 = 1024;
const MAX_LAYERS: i32 = 4096;
const MAX_CONTEXT: i32 = 1 << 24;
const MAX_CONCURRENT_REQUESTS: i32 = 4096;

impl RingPlanSpec {
    /// Checks everything that an executor relies on: counts within bounds, unique names, and windows that cover
    /// layers `0..layers` once, in ring order, round after round.
    pub fn validate(&self) -> Result<(), RingPlanError> {
        self.check_numbers()?;
        self.check_api_keys()?;
        self.check_models()?;
        self.check_members()?;
        self.check_public_keys()?;
        self.check_windows()
    }

    fn check_numbers(&self) -> Result<(), RingPlanError> {
        let context = self.context_length.into();
        let (requests, contexts) = (self.max_concurrent_requests.into(), self.kv_contexts.into());
        let windowed = self.windowed_sequences.into();
        let chunk = self.chunk_positions.into();
        let chunks = (CHUNK_POSITIONS as i64, MOST_CHUNK_POSITIONS as i64);
        let most_requests = MAX_CONCURRENT_REQUESTS.into();
        let members = self.members.len() as i64;
        let port = self.http_port.unwrap_or(1).into();
        bounded("generation", self.generation, 1, i64::MAX)?;
        bounded("contextLength", context, 1, MAX_CONTEXT.into())?;
        bounded("maxConcurrentRequests", requests, 1, most_requests)?;
        bounded("kvContexts", contexts, 1, most_requests)?;
        bounded("windowedSequences", windowed, 1, most_requests)?;
        bounded("chunkPositions", chunk, chunks.0, chunks.1)?;
        bounded("rounds", self.rounds.into(), 1, MAX_ROUNDS.into())?;
        bounded("members (count)", members, 1, MAX_MEMBERS as i64)?;
        bounded("httpPort", port, 1, u16::MAX.into())
    }

    fn check_api_keys(&self) -> Result<(), RingPlanError> {
        let is_digest = |digest: &String| {
            digest.len() == 64 && digest.bytes().all(|digit| digit.is_ascii_hexdigit())
        };
        let mut digests = self.api_key_sha256.iter();
        match digests.position(|digest| !is_digest(digest)) {
            None => Ok(()),
            Some(number) => Err(field_error(
                &format!("apiKeySha256[{number}]"),
                "expected 64 hexadecimal digits, the SHA-256 of a key".into(),
            )),
        }
    }

    fn check_models(&self) -> Result<(), RingPlanError> {
        let mut models = vec![("model", &self.model)];
        if let Some(draft) = &self.draft {
            models.push(("draft.model", &draft.model));
            bounded("draft.memoryBytes", draft.memory_bytes, 0, i64::MAX)?;
        }
        for (field, model) in models {
            let of = |name| format!("{field}.{name}");
            bounded(&of("sizeBytes"), model.size_bytes, 1, i64::MAX)?;
            bounded(&of("layers"), model.layers.into(), 1, MAX_LAYERS.into())?;
            if model.file.is_empty() {
                return Err(field_error(&of("file"), "must name the GGUF file".into()));
            }
        }
        Ok(())
    }

    fn check_members(&self) -> Result<(), RingPlanError> {
        let mut names = HashSet::new();
        for (rank, member) in self.members.iter().enumerate() {
            let field = |name| format!("members[{rank}].{name}");
            if member.name.is_empty() || !names.insert(&member.name) {
                let problem = format!("{:?} must be non-empty and unique in the ring", member.name);
                return Err(field_error(&field("name"), problem));
            }
            let (sharing, most) = (member.members_on_machine, self.members.len() as i64);
            bounded(&field("membersOnMachine"), sharing.into(), 1, most)?;
            for (name, bytes) in [
                ("readBytesPerToken", member.read_bytes_per_token),
                ("readAheadBytes", member.read_ahead_bytes),
                ("kvBytes", member.kv_bytes),
            ] {
                bounded(&field(name), bytes.unwrap_or(0), 0, i64::MAX)?;
            }
            let rows = member.gpu_from_rows.unwrap_or(1).into();
            bounded(&field("gpuFromRows"), rows, 1, i32::MAX.into())?;
            let gpus = member.gpus.len() as i64;
            bounded(&field("gpus (count)"), gpus, 0, MAX_GPUS)?;
            for gpu in &member.gpus {
                let bytes = gpu.beside_layers_bytes;
                bounded(&field("gpus[].besideLayersBytes"), bytes, 0, i64::MAX)?;
            }
            let (windows, rounds) = (member.windows.len(), self.rounds);
            if windows != rounds as usize {
                let problem =
                    format!("{windows} windows, expected one for each of the {rounds} rounds");
                return Err(field_error(&field("windows"), problem));
            }
            if member.output_head_on_gpu && rank > 0 {
                let problem = "only rank 0 has an output head".to_owned();
                return Err(field_error(&field("outputHeadOnGpu"), problem));
            }
            if member.draft_on_gpu && (rank > 0 || self.draft.is_none()) {
                let problem = "only rank 0 has a draft model, if the plan names one".to_owned();
                return Err(field_error(&field("draftOnGpu"), problem));
            }
        }
        Ok(())
    }

    /// That no hop of a ring is plain where another is encrypted.
    fn check_public_keys(&self) -> Result<(), RingPlanError> {
        let encrypted = self.is_encrypted();
        for (rank, member) in self.members.iter().enumerate() {
            let problem = match &member.public_key_sha256 {
                Some(key) if !document::is_sha256(key) => {
                    "expected 64 hexadecimal digits in lower case, the SHA-256 of a public key"
                }
                key if key.is_some() != encrypted => {
                    "expected of all members or of none, found of some"
                }
                _ => continue,
            };
            let field = format!("members[{rank}].publicKeySha256");
            return Err(field_error(&field, problem.into()));
        }
        Ok(())
    }

    /// That each layer is in one window, in ring order, round after round.
    fn check_windows(&self) -> Result<(), RingPlanError> {
        let mut next = 0;
        for round in 0..self.rounds as usize {
            for (rank, member) in self.members.iter().enumerate() {
                let window = &member.windows[round];
                let field = format!("members[{rank}].windows[{round}]");
                let PlannedWindow {
                    first,
                    last,
                    gpu_layers,
                } = *window;
                if first != next || last < first {
                    let problem = format!(
                        "layers {first}..{last} do not continue at layer {next}; windows must cover every layer once, in ring order, round after round"
                    );
                    return Err(field_error(&field, problem));
                }
                if !(0..=last - first).contains(&gpu_layers) {
                    let problem =
                        format!("gpuLayers is {gpu_layers}, expected 0..={}", last - first);
                    return Err(field_error(&field, problem));
                }
                next = last;
            }
        }
        if next == self.model.layers {
            return Ok(());
        }
        let problem = format!(
            "the windows end at layer {next}, but the model has {} layers",
            self.model.layers
        );
        Err(field_error("members", problem))
    }
}

fn bounded(field: &str, value: i64, low: i64, high: i64) -> Result<(), RingPlanError> {
    match (low..=high).contains(&value) {
        true => Ok(()),
        false => {
            let problem = format!("{value} is outside {low}..={high}");
            Err(field_error(field, problem))
        }
    }
}

fn field_error(field: &str, problem: String) -> RingPlanError {
    RingPlanError::Field {
        field: format!("spec.{field}"),
        problem,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{plan, problem};
    use super::super::{PlannedDraft, PlannedModel, RingPlanSpec};

    #[test]
    fn accepts_rounds_uneven_and_empty_windows() {
        plan(&[&[(0, 6)]]).validate().unwrap();
        plan(&[&[(0, 1), (4, 5)], &[(1, 4), (5, 6)]])
            .validate()
            .unwrap();
        plan(&[&[(0, 3)], &[(3, 3)], &[(3, 6)]]).validate().unwrap();
    }

    #[test]
    fn names_the_window_that_leaves_a_gap_an_overlap_or_a_rest() {
        assert!(problem(&plan(&[&[(0, 2)], &[(3, 6)]])).contains("members[1].windows[0]"));
        assert!(problem(&plan(&[&[(0, 4)], &[(3, 6)]])).contains("continue at layer 4"));
        assert!(problem(&plan(&[&[(0, 2)], &[(2, 5)]])).contains("end at layer 5"));
        assert!(problem(&plan(&[&[(0, 7)]])).contains("end at layer 7"));
        assert!(problem(&plan(&[&[(0, -1)]])).contains("windows[0]"));
    }

    #[test]
    fn names_the_field_of_a_bad_count_or_name() {
        let mut spec = plan(&[&[(0, 3)], &[(3, 6)]]);
        spec.members[1].name = "m0".into();
        assert!(problem(&spec).contains("spec.members[1].name"));

        let mut spec = plan(&[&[(0, 6)]]);
        spec.rounds = 2;
        assert!(problem(&spec).contains("expected one for each of the 2 rounds"));
        spec.rounds = 0;
        assert!(problem(&spec).contains("spec.rounds"));

        let mut spec = plan(&[&[(0, 6)]]);
        spec.members[0].windows[0].gpu_layers = 7;
        assert!(problem(&spec).contains("gpuLayers is 7, expected 0..=6"));

        let mut spec = plan(&[&[(0, 3)], &[(3, 6)]]);
        spec.members[0].output_head_on_gpu = true;
        spec.validate().unwrap();
        spec.members[1].output_head_on_gpu = true;
        assert!(problem(&spec).contains("members[1].outputHeadOnGpu: only rank 0"));

        let mut spec = plan(&[&[(0, 3)], &[(3, 6)]]);
        spec.members[1].gpu_from_rows = Some(1);
        spec.validate().unwrap();
        spec.members[1].gpu_from_rows = Some(0);
        assert!(problem(&spec).contains("members[1].gpuFromRows: 0 is outside 1.."));
    }

    #[test]
    fn members_have_keys_all_or_none() {
        let mut spec = plan(&[&[(0, 3)], &[(3, 6)]]);
        assert!(!spec.is_encrypted());
        spec.members[1].public_key_sha256 = Some("0a".repeat(32));
        assert!(problem(&spec).contains("members[1].publicKeySha256: expected of all"));
        spec.members[0].public_key_sha256 = Some("0b".repeat(32));
        spec.validate().unwrap();
        assert!(spec.is_encrypted());
        for bad in ["0B".repeat(32), "0b".repeat(31), String::new()] {
            spec.members[0].public_key_sha256 = Some(bad);
            assert!(problem(&spec).contains("members[0].publicKeySha256: expected 64"));
        }
    }

    #[test]
    fn a_draft_model_is_checked_as_the_model_is() {
        let mut spec = plan(&[&[(0, 6)]]);
        spec.draft = Some(PlannedDraft {
            model: PlannedModel::new("small", "/models/small.gguf", 512, 2),
            memory_bytes: 1000,
        });
        spec.validate().unwrap();
        spec.members[0].draft_on_gpu = true;
        spec.validate().unwrap();
        let without = RingPlanSpec {
            draft: None,
            ..spec.clone()
        };
        let refusal = "members[0].draftOnGpu: only rank 0 has a draft model, if the plan names one";
        assert!(problem(&without).contains(refusal));
        let refused = |change: fn(&mut PlannedDraft)| {
            let mut spec = spec.clone();
            change(spec.draft.as_mut().unwrap());
            problem(&spec)
        };
        for (problem, field) in [
            (refused(|draft| draft.model.file.clear()), "model.file"),
            (refused(|draft| draft.model.layers = 0), "model.layers"),
            (
                refused(|draft| draft.model.size_bytes = 0),
                "model.sizeBytes",
            ),
            (refused(|draft| draft.memory_bytes = -1), "memoryBytes"),
        ] {
            assert!(
                problem.contains(&format!("spec.draft.{field}")),
                "{problem}"
            );
        }
    }
}
