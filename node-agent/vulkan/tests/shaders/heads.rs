//! What becomes of new queries, keys and values.

use half::f16;
use prima_kernels as cpu;
use prima_vulkan::{Buffer, HeadNorms, Heads, KV_POSITIONS, KvShape, SequenceRows};

use crate::new_rows::{EPSILON, NEW, NewRows, PASS_ROWS, norm};
use crate::support::{DEVICE, Random, append, assert_close, buffer, read};

/// What becomes of new rows: of queries in place, of keys and values in blocks.
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
    let (query_heads, kv_heads) = (3, 2);
    let mut random = Random(pairs as u64);
    let mut row = |heads: usize| random.numbers(PASS_ROWS * heads * head_dim);
    let (queries, keys, values) = (row(query_heads), row(kv_heads), row(kv_heads));
    let norms = [random.numbers(head_dim), random.numbers(head_dim)];
    let kv = KvShape {
        kv_heads,
        head_dim,
        values_in_keys: None,
    };
    let new = NewRows::new(kv, pairing, pairs);
    let expected = |numbers: &[f32], heads: usize, weights: &[f32]| -> Vec<f32> {
        let mut numbers = numbers.to_vec();
        for head in numbers.chunks_exact_mut(head_dim).filter(|_| normed) {
            norm(head, weights);
        }
        new.turn(cpu::rotate, &mut numbers, heads);
        numbers
    };
    let expected_queries = expected(&queries, query_heads, &norms[0]);
    let expected_keys = expected(&keys, kv_heads, &norms[1]);

    let first = query_heads * head_dim;
    let on_gpu = [&queries, &keys, &values].map(|numbers| buffer(numbers));
    let norms = norms.map(|norm| buffer(&norm));
    let mut pass = DEVICE.pass().unwrap();
    let [query_rows, key_rows, value_rows] = on_gpu.each_ref().map(Buffer::whole);
    pass.prepare_heads(Heads {
        sequence: new.sequence(),
        heads: query_heads,
        queries: query_rows,
        keys: key_rows,
        values: value_rows,
        norms: normed.then(|| HeadNorms {
            query: norms[0].whole(),
            key: norms[1].whole(),
            epsilon: EPSILON,
        }),
        rotation: new.rotation(),
    })
    .unwrap();
    pass.finish().unwrap();

    let found = read(&on_gpu[0]);
    assert_eq!(found[..first], queries[..first], "{what}: another's row");
    assert_close(&found[first..], &expected_queries[first..], 1e-5, &what);
    let width = kv_heads * head_dim;
    for row in 0..NEW {
        let [kept_keys, kept_values] = new.kept(row);
        let own = (row + 1) * width..(row + 2) * width;
        assert_close(&kept_keys, &expected_keys[own.clone()], 1e-3, &what);
        assert_close(&kept_values, &values[own], 1e-3, &what);
    }
}

#[test]
fn numbers_beyond_f16_are_kept_at_its_largest() {
    let (keys, values) = (buffer(&[1e6_f32, -1e6]), buffer(&[1e6_f32, 3.0]));
    let kv = KvShape {
        kv_heads: 1,
        head_dim: 2,
        values_in_keys: None,
    };
    let cache = buffer(&vec![0_u8; kv.block_bytes() as usize]);
    let blocks = buffer(&[0_u32]);
    let sequence = SequenceRows {
        blocks: blocks.whole(),
        blocks_at: 0,
        first_block: 0,
        cache: cache.whole(),
        kv,
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
