//! Attention: the textbook formula in f64, and the same bits whatever the batch, the chunks of a prefill and
//! the pool. With keys and values as F16, and as Q8_0; and with values that are a part of their keys.

use half::f16;
use prima_kernels::{
    AttentionShape, BLOCK_POSITIONS, IsaLevel, KvBlock, KvShape, SequenceAttention, ThreadPool,
    attention,
};

use crate::levels;
use crate::reference::Random;

#[derive(Clone)]
struct Case {
    shape: AttentionShape<'static>,
    sinks: Option<Vec<f32>>,
    /// Rows of `heads * head_dim`, for every position.
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    format: Format,
    blocks: Vec<KvBlock>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Format {
    F16,
    Q8_0,
}

/// Heads, KV heads, head dimension, positions.
type Sizes = (usize, usize, usize, usize);

impl Format {
    fn block(self, shape: KvShape) -> KvBlock {
        match self {
            Format::F16 => KvBlock::f16(shape),
            Format::Q8_0 => KvBlock::q8_0(shape),
        }
    }

    /// The numbers of one head at one position, as they are worth when they were stored.
    fn stored(self, numbers: &[f32]) -> Vec<f64> {
        if self == Format::F16 {
            return numbers.iter().map(|x| f16::from_f32(*x).to_f64()).collect();
        }
        let blocks = numbers.chunks_exact(32).flat_map(|numbers| {
            let largest = numbers
                .iter()
                .fold(0.0, |largest: f32, x| largest.max(x.abs()));
            let scale = f16::from_f32(largest / 127.0);
            let inverse = 1.0 / scale.to_f32();
            let steps = numbers.iter().map(move |x| (x * inverse).round_ties_even());
            steps.map(move |steps| f64::from(steps) * scale.to_f64())
        });
        blocks.collect()
    }
}

impl Case {
    fn new(seed: u64, format: Format, sizes: Sizes) -> Case {
        Case::with_values(seed, format, sizes, None)
    }

    /// Where values are the first numbers of keys, so many of them.
    fn with_values(
        seed: u64,
        format: Format,
        (heads, kv_heads, head_dim, positions): Sizes,
        values_in_keys: Option<usize>,
    ) -> Case {
        let mut random = Random(seed);
        let kv = KvShape {
            kv_heads,
            head_dim,
            values_in_keys,
        };
        let (row, kv_row) = (heads * head_dim, kv_heads * head_dim);
        let value_row = kv.value_row_len();
        let mut case = Case {
            shape: AttentionShape {
                heads,
                kv,
                scale: 1.0 / (head_dim as f32).sqrt(),
                window: None,
                softcap: None,
                sinks: None,
            },
            sinks: None,
            queries: random
                .units(positions * row)
                .iter()
                .map(|q| q * 6.0)
                .collect(),
            keys: random.units(positions * kv_row),
            values: random.units(positions * value_row),
            format,
            blocks: Vec::new(),
        };
        for position in 0..positions {
            let within = position % BLOCK_POSITIONS;
            if within == 0 {
                // Data behind the last position must not matter, so it is the worst there can be.
                let mut block = format.block(kv);
                let worst = vec![f32::NAN; kv_row];
                let store = |place| block.store(place, &worst, &worst[..value_row]);
                (0..BLOCK_POSITIONS).for_each(store);
                case.blocks.push(block);
            }
            let block = case.blocks.last_mut().unwrap();
            let key = &case.keys[position * kv_row..(position + 1) * kv_row];
            let value = &case.values[position * value_row..(position + 1) * value_row];
            block.store(within, key, value);
        }
        case
    }

    fn row(&self) -> usize {
        self.shape.heads * self.shape.kv.head_dim
    }

    /// Numbers of a row of results.
    fn out_row(&self) -> usize {
        self.shape.heads * self.shape.kv.value_dim()
    }

    fn positions(&self) -> usize {
        self.queries.len() / self.row()
    }

    /// Rows `first..first + rows` in one call.
    fn run(&self, pool: &ThreadPool, first: usize, rows: usize) -> Vec<f32> {
        // Only what the first row's window reaches.
        let window = self.shape.window.unwrap_or(usize::MAX);
        let first_block = (first + 1).saturating_sub(window) / BLOCK_POSITIONS;
        let blocks: Vec<&KvBlock> = self.blocks[first_block..].iter().collect();
        let mut out = vec![f32::NAN; rows * self.out_row()];
        attention(
            pool,
            &AttentionShape {
                sinks: self.sinks.as_deref(),
                ..self.shape
            },
            &mut [SequenceAttention {
                queries: &self.queries[first * self.row()..(first + rows) * self.row()],
                first_position: first,
                first_block,
                blocks: &blocks,
                out: &mut out,
            }],
        );
        out
    }

    /// The definition, with keys and values as they were stored.
    fn exact(&self, position: usize, head: usize) -> Vec<f64> {
        let KvShape {
            kv_heads, head_dim, ..
        } = self.shape.kv;
        let values = match self.shape.kv.values_in_keys {
            Some(_) => &self.keys,
            None => &self.values,
        };
        let kv_head = head * kv_heads / self.shape.heads;
        let stored = |numbers: &[f32], position: usize| -> Vec<f64> {
            let at = (position * kv_heads + kv_head) * head_dim;
            self.format.stored(&numbers[at..at + head_dim])
        };
        let at = (position * self.shape.heads + head) * head_dim;
        let query = &self.queries[at..at + head_dim];
        let window = self.shape.window.unwrap_or(usize::MAX);
        let seen = (position + 1).saturating_sub(window)..position + 1;
        let scores: Vec<f64> = seen
            .clone()
            .map(|p| {
                let key = stored(&self.keys, p);
                let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * k);
                let score = products.sum::<f64>() * f64::from(self.shape.scale);
                match self.shape.softcap.map(f64::from) {
                    Some(softcap) => softcap * (score / softcap).tanh(),
                    None => score,
                }
            })
            .collect();
        let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
        let all = || scores.iter().copied().chain(sink);
        let largest = all().fold(f64::MIN, f64::max);
        let sum: f64 = all().map(|s| (s - largest).exp()).sum();
        let mut out = vec![0.0; self.shape.kv.value_dim()];
        for (p, score) in seen.zip(&scores) {
            let weight = (score - largest).exp() / sum;
            for (out, value) in out.iter_mut().zip(stored(values, p)) {
                *out += weight * value;
            }
        }
        out
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Grouped and not, odd dimensions, more than one chunk. Then windows, which begin in the middle of blocks and end before some chunks, and
/// soft caps; then sinks. Each in all formats that hold heads of that size.
fn cases(seed: u64) -> Vec<Case> {
    let plain = [
        (9, 3, 64, 140),
        (4, 4, 32, 70),
        (14, 2, 16, 65),
        (2, 1, 24, 300),
        (3, 1, 13, 33),
        (11, 1, 128, 20),
        (2, 1, 96, 300),
    ];
    let with_windows = [
        (Some(1), None, (2, 1, 16, 70)),
        (Some(8), None, (4, 2, 32, 90)),
        (Some(64), Some(2.0), (3, 1, 32, 200)),
        (Some(130), None, (2, 2, 24, 600)),
        (Some(130), None, (2, 2, 32, 600)),
        (Some(1000), Some(50.0), (2, 1, 32, 80)),
        (None, Some(0.5), (2, 1, 16, 80)),
    ];
    let plain = plain.map(|sizes| (None, None, sizes));
    let in_formats = |(window, softcap, sizes): (Option<usize>, Option<f32>, Sizes)| {
        let formats = [Format::F16, Format::Q8_0].into_iter();
        let holds = move |format: &Format| *format == Format::F16 || sizes.2.is_multiple_of(32);
        formats.filter(holds).map(move |format| {
            let mut case = Case::new(seed, format, sizes);
            (case.shape.window, case.shape.softcap) = (window, softcap);
            case
        })
    };
    let sizes = [(8, 2, 32, 90), (2, 1, 24, 300), (9, 3, 32, 20)];
    let with_sinks = sizes.into_iter().zip([None, Some(130), Some(8)]);
    let with_sinks = with_sinks.flat_map(|(sizes, window)| in_formats((window, None, sizes)));
    let with_sinks = with_sinks.map(|mut case| {
        // Far below the scores, among them, and above.
        let sinks = [-1e3, -2.0, 0.5, 3.0, 40.0];
        case.sinks = Some((0..case.shape.heads).map(|head| sinks[head % 5]).collect());
        case
    });
    // Latent rows: heads that fill tiles and not, more than one chunk, several KV heads, all of a key. DeepSeek's sizes are the last.
    let latent = [
        ((16, 1, 96, 140), 64),
        ((5, 1, 64, 300), 32),
        ((4, 2, 96, 70), 32),
        ((2, 1, 64, 65), 64),
        ((20, 1, 576, 20), 512),
    ];
    let latent = latent.into_iter().flat_map(|(sizes, value_dim)| {
        let formats = [Format::F16, Format::Q8_0];
        formats.map(|format| Case::with_values(seed, format, sizes, Some(value_dim)))
    });
    let others = plain.into_iter().chain(with_windows).flat_map(in_formats);
    others.chain(with_sinks).chain(latent).collect()
}

#[test]
fn attention_is_the_textbook_formula() {
    for level in levels() {
        for case in cases(7) {
            let positions = case.positions();
            let out = case.run(&ThreadPool::new(2, level).unwrap(), 0, positions);
            for position in (0..positions).step_by(7).chain([positions - 1]) {
                for head in 0..case.shape.heads {
                    let exact = case.exact(position, head);
                    let at = position * case.out_row() + head * case.shape.kv.value_dim();
                    for (got, exact) in out[at..].iter().zip(exact) {
                        assert!(
                            (f64::from(*got) - exact).abs() < 4e-6,
                            "{level} {:?} {:?} head {head} at {position}: {got} for {exact}",
                            case.format,
                            case.shape
                        );
                    }
                }
            }
        }
    }
}

/// Compares prefills in pieces of so many rows, on so many threads, with the whole.
fn cut(cases: Vec<Case>, pieces: &[(usize, usize)]) {
    for level in levels() {
        for case in &cases {
            let positions = case.positions();
            let whole = case.run(&ThreadPool::new(1, level).unwrap(), 0, positions);
            for &(threads, chunk) in pieces {
                let pool = ThreadPool::new(threads, level).unwrap();
                for first in (0..positions).step_by(chunk) {
                    let rows = chunk.min(positions - first);
                    let got = case.run(&pool, first, rows);
                    let row = case.out_row();
                    let expected = &whole[first * row..(first + rows) * row];
                    assert_eq!(bits(&got), bits(expected), "{level} rows {first}+{rows}");
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_however_a_prefill_is_cut() {
    let pieces = [(1, 1), (2, 1), (8, 1), (2, 5), (3, 64), (40, usize::MAX)];
    cut(cases(8), &pieces);
}

/// A part of that, for processors that are emulated.
#[test]
fn a_row_has_the_same_bits_in_pieces_of_five() {
    let small = cases(8).into_iter();
    let small = small.filter(|case| case.positions() <= 90).collect();
    cut(small, &[(2, 5)]);
}

#[test]
fn sequences_of_a_batch_do_not_change_each_other() {
    let batch_of = |format| {
        let case = |seed, positions| Case::new(seed, format, (6, 2, 32, positions));
        [case(9, 90), case(10, 20), case(11, 400)]
    };
    let batches = [batch_of(Format::F16), batch_of(Format::Q8_0)];
    for (level, cases) in levels()
        .into_iter()
        .flat_map(|level| batches.iter().map(move |cases| (level, cases)))
    {
        for threads in [1, 2, 16] {
            let pool = ThreadPool::new(threads, level).unwrap();
            let blocks: Vec<Vec<&KvBlock>> = cases
                .iter()
                .map(|case| case.blocks.iter().collect())
                .collect();
            let firsts = [89, 15, 399];
            let mut outs: Vec<Vec<f32>> = Vec::new();
            for (case, first) in cases.iter().zip(firsts) {
                outs.push(vec![0.0; case.queries.len() - first * case.row()]);
            }
            let mut batch: Vec<SequenceAttention<'_>> = Vec::new();
            for (index, out) in outs.iter_mut().enumerate() {
                let case = &cases[index];
                batch.push(SequenceAttention {
                    queries: &case.queries[firsts[index] * case.row()..],
                    first_position: firsts[index],
                    first_block: 0,
                    blocks: &blocks[index],
                    out,
                });
            }
            attention(&pool, &cases[0].shape, &mut batch);
            for ((case, first), out) in cases.iter().zip(firsts).zip(&outs) {
                let alone = case.run(&pool, first, out.len() / case.row());
                assert_eq!(bits(out), bits(&alone), "{level} on {threads}");
            }
        }
    }
}

/// What attention to this position alone gives: its value, as it was stored.
fn read_back(format: Format, numbers: &[f32]) -> Vec<f32> {
    let mut case = Case::new(12, format, (1, 1, numbers.len(), 1));
    let key = case.keys.clone();
    case.blocks[0].store(0, &key, numbers);
    case.run(&ThreadPool::new(1, IsaLevel::SCALAR).unwrap(), 0, 1)
}

#[test]
fn numbers_beyond_half_precision_are_stored_as_its_largest() {
    let stored = read_back(Format::F16, &[1e9, -1e9, f32::INFINITY, f32::NAN]);
    assert_eq!(stored[..3], [65_504.0, -65_504.0, 65_504.0]);
    assert!(stored[3].is_nan());
}

#[test]
fn q8_0_numbers_are_within_half_a_step_of_their_own_block() {
    let mut numbers = Random(13).units(128);
    numbers[32..64].iter_mut().for_each(|x| *x *= 1e4);
    numbers[64..96].fill(0.0);
    numbers[96..].iter_mut().for_each(|x| *x *= 1e-2);
    let stored = read_back(Format::Q8_0, &numbers);
    for (numbers, stored) in numbers.chunks(32).zip(stored.chunks(32)) {
        let largest = numbers
            .iter()
            .fold(0.0, |largest: f32, x| largest.max(x.abs()));
        // Half a step of a scale that is itself rounded to 11 bits.
        let most = largest / 127.0 * (0.5 + 1.0 / 16.0);
        for (number, stored) in numbers.iter().zip(stored) {
            assert!((number - stored).abs() <= most, "{stored} for {number}");
        }
    }
}

#[test]
fn q8_0_saturates_and_nan_stays_nan() {
    let mut numbers = [1.0; 64];
    (numbers[0], numbers[1]) = (f32::INFINITY, -1e9);
    numbers[40] = f32::NAN;
    let stored = read_back(Format::Q8_0, &numbers);
    assert_eq!(stored[..3], [127.0 * 65_504.0, -127.0 * 65_504.0, 0.0]);
    assert!(stored[32..].iter().all(|number| number.is_nan()));
}

#[test]
fn q8_0_takes_17_bytes_where_f16_takes_32() {
    let shape = KvShape {
        kv_heads: 3,
        head_dim: 64,
        values_in_keys: None,
    };
    let latent = KvShape {
        kv_heads: 1,
        head_dim: 576,
        values_in_keys: Some(512),
    };
    assert_eq!(KvBlock::f16(shape).bytes(), 2 * 2 * 64 * 3 * 64);
    assert_eq!(KvBlock::f16(latent).bytes(), 2 * 64 * 576);
    for shape in [shape, latent] {
        assert_eq!(
            KvBlock::q8_0(shape).bytes() * 32,
            KvBlock::f16(shape).bytes() * 17
        );
    }
}

#[test]
fn a_position_is_read_as_it_was_stored() {
    let whole = KvShape {
        kv_heads: 3,
        head_dim: 64,
        values_in_keys: None,
    };
    let latent = KvShape {
        kv_heads: 1,
        head_dim: 96,
        values_in_keys: Some(64),
    };
    for shape in [whole, latent] {
        let mut random = Random(7);
        for (mut block, exact) in [(KvBlock::f16(shape), true), (KvBlock::q8_0(shape), false)] {
            let rows: Vec<[Vec<f32>; 2]> = (0..BLOCK_POSITIONS)
                .map(|_| [shape.row_len(), shape.value_row_len()].map(|len| random.units(len)))
                .collect();
            for (position, [key, value]) in rows.iter().enumerate() {
                block.store(position, key, value);
            }
            for (position, [key, value]) in rows.iter().enumerate() {
                let mut found = [key.len(), value.len()].map(|len| vec![f16::ZERO; len]);
                let [keys, values] = &mut found;
                block.load(position, keys, values);
                for (found, stored) in found.concat().iter().zip([&key[..], value].concat()) {
                    // Numbers are below 1, so a step of Q8_0 is below 1/127.
                    let off = (found.to_f32() - stored).abs();
                    let near = off < 0.5 / 127.0 + 1e-3;
                    let same = *found == f16::from_f32(stored);
                    assert!(
                        if exact { same } else { near },
                        "{position}: {found} {stored}"
                    );
                }
            }
        }
    }
}
