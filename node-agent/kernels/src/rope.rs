//! Rotary position embedding (Su et al. 2021): pairs of a head's numbers are turned by an angle proportional to
//! the position. Decides the angles, once per position for all layers; the model says which numbers form a
//! pair.

use super::shared_slice::SharedSlice;
use super::thread_pool::ThreadPool;

/// Which numbers of a head are turned together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairing {
    /// Neighbours, `(2i, 2i + 1)`: GGUF's llama.
    Interleaved,
    /// The halves, `(i, i + dims / 2)`: GPT-NeoX and qwen2.
    Halves,
}

/// The frequencies of a model's rotation.
#[derive(Debug, Clone)]
pub struct Rope {
    pairing: RopePairing,
    /// Radians per position, one for each pair.
    frequencies: Vec<f64>,
    /// What sines and cosines are multiplied by.
    magnitude: f64,
}

/// The sines and cosines for the positions of a batch.
#[derive(Debug, Clone)]
pub struct RopeAngles {
    pairing: RopePairing,
    pairs: usize,
    /// Per position: `pairs` cosines, then `pairs` sines.
    turns: Vec<f32>,
}

impl Rope {
    /// The rotation of `2 * frequencies.len()` numbers of each head, the first or the last: pair `i` turns by `frequencies[i]` radians per
    /// position, and grows by `magnitude`, which is 1 in most models.
    pub fn new(pairing: RopePairing, frequencies: Vec<f64>, magnitude: f32) -> Rope {
        Rope {
            pairing,
            frequencies,
            magnitude: magnitude.into(),
        }
    }

    /// The angles for rows at these positions, in order.
    pub fn angles(&self, positions: impl IntoIterator<Item = usize>) -> RopeAngles {
        let mut turns = Vec::new();
        for position in positions {
            let angles = self.frequencies.iter().map(|f| position as f64 * f);
            // In f64: an f32 angle at position 100,000 would be off by a hundredth of a radian.
            let cosine = |angle: f64| (self.magnitude * angle.cos()) as f32;
            let sine = |angle: f64| (self.magnitude * angle.sin()) as f32;
            turns.extend(angles.clone().map(cosine));
            turns.extend(angles.map(sine));
        }
        RopeAngles {
            pairing: self.pairing,
            pairs: self.frequencies.len(),
            turns,
        }
    }
}

impl RopeAngles {
    /// Rows, that is positions.
    pub fn rows(&self) -> usize {
        self.turns.len() / (2 * self.pairs).max(1)
    }

    /// Pairs turned in each head.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// For each row the cosines of its pairs, then their sines.
    pub fn turns(&self) -> &[f32] {
        &self.turns
    }
}

/// Rows per piece of work.
const PIECE_ROWS: usize = 16;

/// Turns every head of `x` in place: one row of `heads * head_dim` numbers for each position of `angles`.
/// Numbers of a head beyond the rotated dimensions stay.
///
/// # Panics
/// When `x` is not that long, or a head is shorter than what is rotated.
pub fn rotate(
    pool: &ThreadPool,
    angles: &RopeAngles,
    x: &mut [f32],
    heads: usize,
    head_dim: usize,
) {
    turn(pool, angles, x, heads, head_dim, |_| 0);
}

/// As [`rotate`], the last numbers of every head instead of the first.
///
/// # Panics
/// As there.
pub fn rotate_last(
    pool: &ThreadPool,
    angles: &RopeAngles,
    x: &mut [f32],
    heads: usize,
    head_dim: usize,
) {
    turn(pool, angles, x, heads, head_dim, |turned| head_dim - turned);
}

/// `first` is where the numbers that are turned, of which it is told how many, begin in a head.
fn turn(
    pool: &ThreadPool,
    angles: &RopeAngles,
    x: &mut [f32],
    heads: usize,
    head_dim: usize,
    first: impl Fn(usize) -> usize,
) {
    let (pairs, row) = (angles.pairs, heads * head_dim);
    if pairs == 0 {
        return;
    }
    let rows = angles.turns.len() / (2 * pairs);
    assert_eq!(
        x.len(),
        rows * row,
        "{rows} rows of {heads} heads of {head_dim}"
    );
    assert!(2 * pairs <= head_dim, "{} rotated of {head_dim}", 2 * pairs);
    let from = first(2 * pairs);
    let turned = from..from + 2 * pairs;
    let x = SharedSlice::new(x);
    pool.run(rows.div_ceil(PIECE_ROWS), &|piece| {
        let (first, last) = (piece * PIECE_ROWS, ((piece + 1) * PIECE_ROWS).min(rows));
        // SAFETY: pieces are disjoint ranges of rows.
        let x = unsafe { x.part(first * row..last * row) };
        let turns = angles.turns[first * 2 * pairs..].chunks_exact(2 * pairs);
        for (x, turns) in x.chunks_exact_mut(row).zip(turns) {
            let (cosines, sines) = turns.split_at(pairs);
            for head in x.chunks_exact_mut(head_dim) {
                let head = &mut head[turned.clone()];
                match angles.pairing {
                    RopePairing::Interleaved => turn_neighbours(head, cosines, sines),
                    RopePairing::Halves => turn_halves(head, cosines, sines),
                }
            }
        }
    });
}

fn turn_neighbours(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (pairs, _) = head.as_chunks_mut::<2>();
    for ((pair, cos), sin) in pairs.iter_mut().zip(cosines).zip(sines) {
        let [a, b] = *pair;
        *pair = [a * cos - b * sin, a * sin + b * cos];
    }
}

fn turn_halves(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (first, second) = head.split_at_mut(cosines.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa_level::IsaLevel;
    use super::*;

    /// The definition: complex multiplication by e^(i position frequency).
    fn expected(x: &[f32], position: usize, pairing: RopePairing, frequencies: &[f64]) -> Vec<f64> {
        let mut out: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for (pair, frequency) in frequencies.iter().enumerate() {
            let (i, j) = match pairing {
                RopePairing::Interleaved => (2 * pair, 2 * pair + 1),
                RopePairing::Halves => (pair, pair + frequencies.len()),
            };
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = (f64::from(x[i]), f64::from(x[j]));
            (out[i], out[j]) = (a * cos - b * sin, a * sin + b * cos);
        }
        out
    }

    fn frequencies(pairs: usize) -> Vec<f64> {
        let frequency = |pair: usize| 10_000_f64.powf(-(pair as f64) / pairs as f64);
        (0..pairs).map(frequency).collect()
    }

    #[test]
    fn rotations_are_complex_multiplications() {
        let (heads, head_dim) = (3, 24);
        let positions: Vec<usize> = (0..37).map(|i| i * i * 90).collect();
        let x: Vec<f32> = (0..37 * heads * head_dim)
            .map(|i| (i as f32).cos())
            .collect();
        let pool = ThreadPool::new(2, IsaLevel::detect()).unwrap();
        for pairing in [RopePairing::Interleaved, RopePairing::Halves] {
            for frequencies in [frequencies(12), frequencies(8)] {
                let rope = Rope::new(pairing, frequencies.clone(), 1.0);
                let angles = rope.angles(positions.iter().copied());
                let mut turned = x.clone();
                rotate(&pool, &angles, &mut turned, heads, head_dim);
                let mut last_turned = x.clone();
                rotate_last(&pool, &angles, &mut last_turned, heads, head_dim);
                let first_of_last = head_dim - 2 * frequencies.len();
                for (row, position) in positions.iter().enumerate() {
                    for head in 0..heads {
                        let at = (row * heads + head) * head_dim;
                        let head = &x[at..at + head_dim];
                        let exact = expected(head, *position, pairing, &frequencies);
                        for (turned, exact) in turned[at..].iter().zip(exact) {
                            assert!((f64::from(*turned) - exact).abs() < 5e-7);
                        }
                        let (stay, last) = head.split_at(first_of_last);
                        let found = &last_turned[at..at + head_dim];
                        assert_eq!(found[..first_of_last], *stay);
                        let exact = expected(last, *position, pairing, &frequencies);
                        for (turned, exact) in found[first_of_last..].iter().zip(exact) {
                            assert!((f64::from(*turned) - exact).abs() < 5e-7);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_magnitude_stretches_what_is_rotated() {
        let plain = Rope::new(RopePairing::Halves, frequencies(8), 1.0);
        let longer = Rope::new(RopePairing::Halves, frequencies(8), 1.5);
        let turns = plain.angles([3, 5]).turns;
        for (longer, turn) in longer.angles([3, 5]).turns.iter().zip(turns) {
            assert!((longer - 1.5 * turn).abs() < 2e-7);
        }
    }
}
