//! What becomes of new queries, keys and values.

use half::f16;
use prima_kernels as cpu;
use prima_vulkan::{
    Buffer, HeadNorms, Heads, KV_POSITIONS, Rotation, SequenceRows, kv_block_bytes,
};

use crate::support::{DEVICE, Random, append, assert_close, buffer, read};

/// What becomes of the heads of a pass whose first row is another sequence's: queries in place, keys and values in blocks.
struct HeadsCase {
    pairing: cpu::RopePairing,
    head_dim: usize,
    /// Pairs that are turned.
    pairs: usize,
    normed: bool,
}

#[test]
fn heads_are_normed_and_rotated_as_the_processor_does() {
    use cpu::RopePairing::{Halves, Interleaved};
    for pairing in [Interleaved, Halves] {
        for (head_dim, pairs) in [(16, 8), (16, 4), (16, 0), (80, 40), (256, 128)] {
            for normed in [false, true] {
                heads(&HeadsCase {
                    pairing,
                    head_dim,
                    pairs,
                    normed,
                });
            }
        }
    }
}

fn heads(case: &HeadsCase) {
    let HeadsCase {
        pairing,
        head_dim,
        pairs,
        normed,
    } = *case;
    let what = format!("{pairing:?}, {pairs} pairs of {head_dim}, norms {normed}");
    let (query_heads, kv_heads, new, held) = (3, 2, 4, 62);
    let mut random = Random(pairs as u64);
    let mut row = |heads: usize| random.numbers((new + 1) * heads * head_dim);
    let (queries, keys, values) = (row(query_heads), row(kv_heads), row(kv_heads));
    let norms = [random.numbers(head_dim), random.numbers(head_dim)];
    let frequencies = (0..pairs).map(|pair| 0.7_f64.powi(pair as i32)).collect();
    let angles = cpu::Rope::new(pairing, frequencies, 1.2).angles([9, 0, 1, 77, 5000]);

    let pool = cpu::ThreadPool::new(1, cpu::IsaLevel::SCALAR).unwrap();
    let expected = |numbers: &[f32], heads: usize, weight: &[f32]| -> Vec<f32> {
        let mut numbers = numbers.to_vec();
        for head in numbers.chunks_exact_mut(head_dim).filter(|_| normed) {
            let mean = head.iter().map(|x| x * x).sum::<f32>() / head_dim as f32;
            for (x, weight) in head.iter_mut().zip(weight) {
                *x *= weight / (mean + 1e-5).sqrt();
            }
        }
        if pairs > 0 {
            cpu::rotate(&pool, &angles, &mut numbers, heads, head_dim);
        }
        numbers
    };
    let expected_queries = expected(&queries, query_heads, &norms[0]);
    let expected_keys = expected(&keys, kv_heads, &norms[1]);

    let first = query_heads * head_dim;
    let on_gpu = [&queries, &keys, &values].map(|numbers| buffer(numbers));
    let norms = norms.map(|norm| buffer(&norm));
    let turns = buffer(&[angles.turns(), &[0.0]].concat());
    // The new rows lie in two blocks, listed the other way round.
    let listed = buffer(&[1_u32, 0]);
    let block = kv_block_bytes(kv_heads, head_dim) as usize;
    let cache = buffer(&vec![0_u8; 2 * block]);
    let mut pass = DEVICE.pass().unwrap();
    let [query_rows, key_rows, value_rows] = on_gpu.each_ref().map(Buffer::whole);
    pass.prepare_heads(Heads {
        sequence: SequenceRows {
            blocks: listed.whole(),
            blocks_at: 0,
            first_block: 0,
            cache: cache.whole(),
            kv_heads,
            head_dim,
            rows: new,
            first_row: 1,
            first_position: held,
        },
        heads: query_heads,
        queries: query_rows,
        keys: key_rows,
        values: value_rows,
        norms: normed.then(|| HeadNorms {
            query: norms[0].whole(),
            key: norms[1].whole(),
            epsilon: 1e-5,
        }),
        rotation: (pairs > 0).then(|| Rotation {
            angles: turns.whole(),
            pairs,
            neighbours: pairing == cpu::RopePairing::Interleaved,
        }),
    })
    .unwrap();
    pass.finish().unwrap();

    let found = read(&on_gpu[0]);
    assert_eq!(found[..first], queries[..first], "{what}: another's row");
    assert_close(&found[first..], &expected_queries[first..], 1e-5, &what);
    let words: Vec<u32> = read(&cache).iter().map(|number| number.to_bits()).collect();
    let width = kv_heads * head_dim;
    for row in 0..new {
        let (place, within) = match held + row < KV_POSITIONS {
            true => (1, held + row),
            false => (0, held + row - KV_POSITIONS),
        };
        let halves = |at: usize| {
            let word = words[place * block / 4 + at];
            [word as u16, (word >> 16) as u16].map(|half| f16::from_bits(half).to_f32())
        };
        let pairs = 0..width / 2;
        let kept_keys: Vec<f32> = (pairs.clone())
            .flat_map(|pair| halves(pair * KV_POSITIONS + within))
            .collect();
        let kept_values: Vec<f32> = pairs
            .flat_map(|pair| halves((KV_POSITIONS + within) * width / 2 + pair))
            .collect();
        let new = (row + 1) * width..(row + 2) * width;
        assert_close(&kept_keys, &expected_keys[new.clone()], 1e-3, &what);
        assert_close(&kept_values, &values[new], 1e-3, &what);
    }
}

#[test]
fn numbers_beyond_f16_are_kept_at_its_largest() {
    let (keys, values) = (buffer(&[1e6_f32, -1e6]), buffer(&[1e6_f32, 3.0]));
    let cache = buffer(&vec![0_u8; kv_block_bytes(1, 2) as usize]);
    let blocks = buffer(&[0_u32]);
    let sequence = SequenceRows {
        blocks: blocks.whole(),
        blocks_at: 0,
        first_block: 0,
        cache: cache.whole(),
        kv_heads: 1,
        head_dim: 2,
        rows: 1,
        first_row: 0,
        first_position: 0,
    };
    let mut pass = DEVICE.pass().unwrap();
    append(&mut pass, sequence, &keys, &values);
    pass.finish().unwrap();
    let words: Vec<u32> = read(&cache).iter().map(|number| number.to_bits()).collect();
    let half = |number: f32| u32::from(f16::from_f32(number).to_bits());
    assert_eq!(words[0], half(65_504.0) | half(-65_504.0) << 16);
    assert_eq!(words[KV_POSITIONS], half(65_504.0) | half(3.0) << 16);
}
