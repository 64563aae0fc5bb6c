//! New rows of a sequence, for tests of the kernels that make them ready to attend. The pass has another sequence's row before them.

use half::f16;
use prima_kernels::{IsaLevel, Rope, RopeAngles, RopePairing, ThreadPool};
use prima_vulkan::{Buffer, KV_POSITIONS, KvShape, Rotation, SequenceRows, unpack_position};

use crate::support::{buffer, words};

/// How many there are, and all rows of the pass.
pub const NEW: usize = 4;
pub const PASS_ROWS: usize = NEW + 1;
/// Positions before them: they lie in two blocks.
const HELD: usize = 62;

pub const EPSILON: f32 = 1e-5;

pub struct NewRows {
    kv: KvShape,
    pairing: RopePairing,
    /// Of all rows of the pass.
    angles: RopeAngles,
    turns: Buffer,
    listed: Buffer,
    cache: Buffer,
}

impl NewRows {
    /// Of each head of which so many pairs are turned.
    pub fn new(kv: KvShape, pairing: RopePairing, pairs: usize) -> NewRows {
        let frequencies = (0..pairs).map(|pair| 0.7_f64.powi(pair as i32)).collect();
        let angles = Rope::new(pairing, frequencies, 1.2).angles([9, 0, 1, 77, 5000]);
        NewRows {
            kv,
            pairing,
            turns: buffer(&[angles.turns(), &[0.0]].concat()),
            angles,
            // The other way round.
            listed: buffer(&[1_u32, 0]),
            cache: buffer(&vec![0_u8; 2 * kv.block_bytes() as usize]),
        }
    }

    pub fn sequence(&self) -> SequenceRows<'_> {
        SequenceRows {
            blocks: self.listed.whole(),
            blocks_at: 0,
            first_block: 0,
            cache: self.cache.whole(),
            kv: self.kv,
            rows: NEW,
            first_row: 1,
            first_position: HELD,
        }
    }

    pub fn rotation(&self) -> Option<Rotation<'_>> {
        let pairs = self.angles.pairs();
        (pairs > 0).then(|| Rotation {
            angles: self.turns.whole(),
            pairs,
            neighbours: self.pairing == RopePairing::Interleaved,
        })
    }

    /// Turns the heads of all rows of the pass as the processor does, by its kernel for their first or their last numbers.
    pub fn turn(
        &self,
        rotate: impl Fn(&ThreadPool, &RopeAngles, &mut [f32], usize, usize),
        numbers: &mut [f32],
        heads: usize,
    ) {
        if self.angles.pairs() > 0 {
            let pool = ThreadPool::new(1, IsaLevel::SCALAR).unwrap();
            let head_dim = numbers.len() / PASS_ROWS / heads;
            rotate(&pool, &self.angles, numbers, heads, head_dim);
        }
    }

    /// Keys and values that are kept of a new row.
    pub fn kept(&self, row: usize) -> [Vec<f32>; 2] {
        let position = HELD + row;
        let block = self.kv.block_bytes() as usize / 4;
        let place = 1 - position / KV_POSITIONS;
        let cache = words(&self.cache);
        let width = self.kv.kv_heads * self.kv.head_dim;
        let value_width = match self.kv.values_in_keys {
            None => width,
            Some(_) => 0,
        };
        let (mut keys, mut values) = (vec![f16::ZERO; width], vec![f16::ZERO; value_width]);
        unpack_position(
            &cache[place * block..][..block],
            position % KV_POSITIONS,
            &mut keys,
            &mut values,
        );
        [keys, values].map(|numbers| numbers.into_iter().map(f16::to_f32).collect())
    }
}

/// What a norm of these weights makes of numbers.
pub fn norm(numbers: &mut [f32], weights: &[f32]) {
    let mean = numbers.iter().map(|x| x * x).sum::<f32>() / numbers.len() as f32;
    for (x, weight) in numbers.iter_mut().zip(weights) {
        *x *= weight / (mean + EPSILON).sqrt();
    }
}
