//! The GPUs of a member, and which of them gets which of its layers.
//!
//! Decides: each takes the next layers as long as it has room for them. A plan counts on that: with n GPUs, at most n - 1 of them are left with
//! less room than a layer takes. Refuses nothing for want of room: what is beyond that goes to the last one, whose driver decides.

use prima_crds::v1alpha1::ring_plan::{PlannedGpu, RingMember};
use prima_engine::{EngineError, Gpu, KvFormat, KvPositions, Model};

/// In the plan's order; none if the plan has nothing on a GPU.
pub struct MemberGpus {
    opened: Vec<OwnGpu>,
}

struct OwnGpu {
    gpu: Gpu,
    /// For errors.
    label: String,
    /// Bytes of its memory that are free for layers.
    room: u64,
}

impl MemberGpus {
    /// Opens those that the plan names, if it has anything on one.
    ///
    /// # Errors
    /// Those of [`Gpu::open_named`].
    pub fn open(member: &RingMember) -> Result<Self, EngineError> {
        let gpus = match member.uses_gpu() {
            true => Gpu::open_named(member.gpus.iter().map(|gpu| gpu.name.as_str()))?,
            false => Vec::new(),
        };
        let beside = |planned: Option<&PlannedGpu>| {
            let bytes = planned.map_or(0, |planned| planned.beside_layers_bytes);
            u64::try_from(bytes).unwrap_or(0)
        };
        let opened = gpus.into_iter().enumerate().map(|(place, gpu)| {
            let facts = gpu.facts()?;
            let beside = beside(member.gpus.get(place));
            Ok(OwnGpu {
                label: facts.label(),
                room: facts.available_bytes.saturating_sub(beside),
                gpu,
            })
        });
        Ok(Self {
            opened: opened.collect::<Result<_, EngineError>>()?,
        })
    }

    /// The one that has what is no layer.
    pub fn first(&self) -> Option<&Gpu> {
        self.opened.first().map(|own| &own.gpu)
    }

    /// Of each window, how many of its layers on GPUs each GPU gets, in the order of the layers. `gpu_layers`: what these layers take, in bytes.
    pub fn split(&self, gpu_layers: &[Vec<u64>]) -> Vec<Vec<(Gpu, usize)>> {
        let rooms: Vec<u64> = self.opened.iter().map(|own| own.room).collect();
        let counts = split(gpu_layers, &rooms);
        self.tell(&counts);
        let of_window = |counts: Vec<usize>| {
            let gpus = self.opened.iter().map(|own| own.gpu.clone());
            gpus.zip(counts).collect()
        };
        counts.into_iter().map(of_window).collect()
    }

    /// Says how many layers each of several has: nobody else knows.
    fn tell(&self, counts: &[Vec<usize>]) {
        if self.opened.len() < 2 {
            return;
        }
        for (place, own) in self.opened.iter().enumerate() {
            let layers: usize = counts.iter().map(|of_window| of_window[place]).sum();
            tracing::info!(
                gpu = own.label.as_str(),
                layers,
                "one of its GPUs takes layers"
            );
        }
    }

    /// The error with the GPU that computes no more, if that is why.
    pub fn blame(&self, error: EngineError) -> EngineError {
        if !error.is_without_gpu() || matches!(error, EngineError::OneGpu { .. }) {
            return error;
        }
        let silent = self.opened.iter().find(|own| !own.gpu.answers());
        match silent {
            Some(own) => EngineError::OneGpu {
                gpu: own.label.clone(),
                source: Box::new(error),
            },
            None => error,
        }
    }
}

/// What a layer takes on a GPU, in bytes: its matrices, and keys and values of so many positions.
pub fn layer_bytes(model: &Model, layer: usize, kv_positions: KvPositions) -> u64 {
    let layer = &model.spec().layers[layer];
    let matrices = layer.matrices().chain(layer.expert_matrices());
    let weights: u64 = matrices
        .map(|matrix| matrix.bytes.end - matrix.bytes.start)
        .sum();
    let positions = match layer.attention.window {
        Some(_) => kv_positions.windowed,
        None => kv_positions.full,
    };
    weights + positions as u64 * layer.attention.kv_bytes(KvFormat::F16) as u64
}

/// Of each window, how many of its layers each GPU gets. Nobody goes back to a GPU that was left.
fn split(windows: &[Vec<u64>], rooms: &[u64]) -> Vec<Vec<usize>> {
    let Some(last) = rooms.len().checked_sub(1) else {
        return vec![Vec::new(); windows.len()];
    };
    let (mut current, mut room) = (0, rooms[0]);
    let of_window = |layers: &Vec<u64>| {
        let mut counts = vec![0; rooms.len()];
        for &bytes in layers {
            while bytes > room && current < last {
                current += 1;
                room = rooms[current];
            }
            room = room.saturating_sub(bytes);
            counts[current] += 1;
        }
        counts
    };
    windows.iter().map(of_window).collect()
}

#[cfg(test)]
mod tests {
    use prima_gguf::GgmlType;
    use prima_test_models::MadeUpModel;

    use super::*;

    /// Of queries and output 256 x 1024 numbers, of keys and values 256 x 512, and of each matrix of the feed-forward part 256 x 512. A position
    /// has 512 numbers of 16 bits for its keys, and as many for its values.
    #[test]
    fn a_layer_takes_its_matrices_and_the_positions_it_keeps() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let made_up = MadeUpModel {
            formats: vec![GgmlType::F32],
            ..MadeUpModel::of("gemma2")
        };
        made_up.write_for_ring(&path);
        let model = Model::open(&path).unwrap();
        let kept = KvPositions {
            full: 70,
            windowed: 30,
        };
        let matrices: u64 = 4 * 256 * (2 * 1024 + 2 * 512 + 3 * 512);
        let taken: Vec<u64> = (0..model.spec().layers.len())
            .map(|layer| layer_bytes(&model, layer, kept) - matrices)
            .collect();
        let layers = model.spec().layers.iter();
        let positions = layers.map(|layer| match layer.attention.window {
            Some(_) => 30_u64,
            None => 70,
        });
        let expected: Vec<u64> = positions.map(|positions| positions * 2 * 2 * 512).collect();
        assert_eq!(taken, expected);
        // There are both kinds.
        assert_ne!(expected[0], expected[1]);
    }

    #[test]
    fn each_gpu_takes_the_next_layers_that_fit() {
        let two = vec![vec![4; 3], vec![4; 2]];
        assert_eq!(split(&two, &[9, 100]), [[2, 1], [0, 2]]);
        assert_eq!(split(&two, &[100, 9]), [[3, 0], [2, 0]]);
        // A GPU without room for one, and layers that differ.
        assert_eq!(split(&[vec![4, 6, 3]], &[3, 10, 3]), [[0, 2, 1]]);
        // Whatever is too much.
        assert_eq!(split(&two, &[4, 4]), [[1, 2], [0, 2]]);
        assert_eq!(split(&two, &[1]), [[3], [2]]);
        assert_eq!(split(&two, &[]), vec![Vec::<usize>::new(); 2]);
    }

    /// Of n GPUs, n - 1 at most are left with less room than a layer takes.
    #[test]
    fn what_a_plan_counts_on_always_fits() {
        let mut state = 1_u64;
        let mut below = |limit: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % limit
        };
        for _ in 0..1000 {
            let rooms: Vec<u64> = (0..=below(4)).map(|_| below(100)).collect();
            let largest = 1 + below(30);
            let usable = rooms.iter().sum::<u64>();
            let usable = usable.saturating_sub(largest * (rooms.len() as u64 - 1));
            let (mut layers, mut taken) = (Vec::new(), 0);
            loop {
                let layer = 1 + below(largest);
                if taken + layer > usable {
                    break;
                }
                taken += layer;
                layers.push(layer);
            }
            let counts = split(std::slice::from_ref(&layers), &rooms);
            let mut rest = layers.as_slice();
            for (room, count) in rooms.iter().zip(&counts[0]) {
                let (own, after) = rest.split_at(*count);
                assert!(own.iter().sum::<u64>() <= *room, "{layers:?} {rooms:?}");
                rest = after;
            }
            assert!(rest.is_empty());
        }
    }
}
