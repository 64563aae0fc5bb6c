//! Multi-head latent attention: what becomes of new queries and latents, attention to latents, and products of heads.

use half::f16;
use prima_gguf::GgmlType;
use prima_kernels as cpu;
use prima_vulkan::{
    Attention, Device, FEW_ROWS, HeadProduct, HeadTiles, KV_POSITIONS, KvShape, LatentHeads,
    Matrix, SequenceRows, attention_groups, attention_part_bytes, pack_position,
};

use crate::new_rows::{EPSILON, NEW, NewRows, PASS_ROWS, norm};
use crate::support::{
    DEVICE, Random, assert_close, buffer, packed, packed_in, read, rounded_to_bytes, rows, words,
};

/// Of deepseek2's models.
const SHAPE: KvShape = KvShape {
    kv_heads: 1,
    head_dim: 576,
    values_in_keys: Some(512),
};
const SMALL: KvShape = KvShape {
    kv_heads: 1,
    head_dim: 96,
    values_in_keys: Some(64),
};

fn at_head_after_head(rows: usize, head: usize, row: usize) -> usize {
    head * rows + row
}

#[test]
fn latents_are_normed_and_what_is_behind_is_rotated() {
    use cpu::RopePairing::{Halves, Interleaved};
    for (kv, unrotated) in [(SHAPE, 128), (SHAPE, 192), (SMALL, 48)] {
        for pairing in [Interleaved, Halves] {
            // All that may be rotated, a part, and nothing.
            let rotated = kv.head_dim - kv.value_dim();
            for pairs in [rotated / 2, rotated / 4, 0] {
                latent_heads(kv, unrotated, pairing, pairs);
            }
        }
    }
}

fn latent_heads(kv: KvShape, unrotated: usize, pairing: cpu::RopePairing, pairs: usize) {
    let what = format!("{kv:?}, {unrotated}, {pairing:?}, {pairs} pairs");
    let heads = 3;
    let (head_dim, rank) = (kv.head_dim, kv.value_dim());
    let rotated = head_dim - rank;
    let query = unrotated + rotated;
    let mut random = Random((unrotated + pairs) as u64);
    let queries = random.numbers(PASS_ROWS * heads * query);
    let keys = random.numbers(PASS_ROWS * head_dim);
    let weights = random.numbers(rank);
    let new = NewRows::new(kv, pairing, pairs);
    let (mut expected_queries, mut expected_keys) = (queries.clone(), keys.clone());
    for key in expected_keys.chunks_exact_mut(head_dim) {
        norm(&mut key[..rank], &weights);
    }
    new.turn(cpu::rotate_last, &mut expected_queries, heads);
    new.turn(cpu::rotate_last, &mut expected_keys, 1);

    let [queries, keys, weights] = [&queries, &keys, &weights].map(|numbers| buffer(numbers));
    let into_latents = buffer(&vec![7.0_f32; PASS_ROWS * heads * unrotated]);
    let rotated_queries = buffer(&vec![7.0_f32; PASS_ROWS * heads * rotated]);
    let mut pass = DEVICE.pass().unwrap();
    pass.prepare_latent_heads(LatentHeads {
        sequence: new.sequence(),
        tiles: HeadTiles::new(PASS_ROWS, heads),
        queries: queries.whole(),
        unrotated,
        keys: keys.whole(),
        norm: weights.whole(),
        epsilon: EPSILON,
        rotation: new.rotation(),
        into_latents: into_latents.whole(),
        rotated: rotated_queries.whole(),
    })
    .unwrap();
    pass.finish().unwrap();

    let (moved, turned) = (read(&into_latents), read(&rotated_queries));
    for row in 0..PASS_ROWS {
        for head in 0..heads {
            let expected = &expected_queries[(row * heads + head) * query..][..query];
            let at = at_head_after_head(PASS_ROWS, head, row) * unrotated;
            let mut found = moved[at..][..unrotated].to_vec();
            found.extend(&turned[(row * heads + head) * rotated..][..rotated]);
            match row {
                0 => assert!(found.iter().all(|x| *x == 7.0), "{what}: another's row"),
                _ => assert_close(&found, expected, 1e-5, &what),
            }
        }
    }
    for row in 0..NEW {
        let [kept, _] = new.kept(row);
        let expected = &expected_keys[(row + 1) * head_dim..][..head_dim];
        assert_close(&kept, expected, 1e-3, &what);
    }
}

#[test]
fn attention_to_latents_sees_what_it_should() {
    // Heads, positions held, rows that come.
    for (kv, heads, held, new) in [
        (SHAPE, 4, 0, 1),
        (SHAPE, 16, 63, 1),
        (SHAPE, 5, 64, 3),
        // Parts of several blocks.
        (SHAPE, 20, 33 * 64, 2),
        // So many groups that each takes all blocks, few rows and many.
        (SHAPE, 128, 70, 3),
        (SHAPE, 16, 130, 20),
        // Many rows in parts.
        (SHAPE, 4, 200, 30),
        (SMALL, 7, 90, 40),
    ] {
        for temperature in [None, Some((0.3, 16))] {
            attention(&DEVICE, (kv, heads), (held, new), temperature);
        }
    }
}

/// At once, and in parts.
#[test]
fn attention_to_latents_group_by_group_is_the_same_to_the_bit() {
    let slow = DEVICE.clone().with_most_part_flop(1);
    for (heads, rows) in [(16, (130, 20)), (4, (200, 30))] {
        let made = [&slow, &*DEVICE].map(|device| attention(device, (SMALL, heads), rows, None));
        assert!(made[0] == made[1]);
    }
}

/// The bits of what comes out.
fn attention(
    device: &Device,
    (kv, heads): (KvShape, usize),
    (held, new): (usize, usize),
    temperature: Option<(f32, usize)>,
) -> Vec<u32> {
    let what = format!("{kv:?}, {heads} heads, {held} + {new}, {temperature:?}");
    let (head_dim, rank) = (kv.head_dim, kv.value_dim());
    let (end, scale) = (held + new, 0.1);
    let mut random = Random((held + heads) as u64);
    let queries = random.numbers(new * heads * head_dim);
    // Rounded to F16, since the cache is of that.
    let keys = random.numbers(end * head_dim);
    let keys: Vec<f16> = keys.into_iter().map(f16::from_f32).collect();
    let in_f32: Vec<f32> = keys.iter().map(|key| key.to_f32()).collect();
    let key = |position: usize| &in_f32[position * head_dim..][..head_dim];

    // Of a pass in which another sequence has the first row.
    let pass_rows = new + 1;
    let rotated = head_dim - rank;
    let mut in_latents = vec![f32::NAN; pass_rows * heads * rank];
    let mut behind = vec![f32::NAN; pass_rows * heads * rotated];
    let mut expected = vec![0.0_f32; pass_rows * heads * rank];
    for row in 0..new {
        let position = held + row;
        let factor = temperature.map_or(1.0, |(t, n): (f32, usize)| {
            1.0 + f64::from(t) * ((position / n) as f64 + 1.0).ln()
        });
        for head in 0..heads {
            let query = &queries[(row * heads + head) * head_dim..][..head_dim];
            let place = at_head_after_head(pass_rows, head, row + 1) * rank;
            in_latents[place..][..rank].copy_from_slice(&query[..rank]);
            let turned = ((row + 1) * heads + head) * rotated;
            behind[turned..][..rotated].copy_from_slice(&query[rank..]);
            let weights: Vec<f64> = (0..=position)
                .map(|seen| {
                    let pairs = query.iter().zip(key(seen));
                    let dot: f64 = pairs.map(|(q, k)| f64::from(q * k)).sum();
                    (dot * scale * factor).exp()
                })
                .collect();
            let sum: f64 = weights.iter().sum();
            for (seen, weight) in weights.iter().enumerate() {
                let out = &mut expected[place..][..rank];
                for (out, value) in out.iter_mut().zip(&key(seen)[..rank]) {
                    *out += (weight / sum) as f32 * value;
                }
            }
        }
    }

    // Blocks lie in any order. Not a number, wherever nothing is written.
    let blocks: Vec<u32> = (0..end.div_ceil(KV_POSITIONS) as u32).rev().collect();
    let block = kv.block_bytes() as usize / 4;
    let mut cache = vec![u32::MAX; blocks.len() * block];
    for (position, key) in keys.chunks_exact(head_dim).enumerate() {
        let at = blocks[position / KV_POSITIONS] as usize * block;
        let own = &mut cache[at..at + block];
        pack_position(own, position % KV_POSITIONS, key, &[]);
    }
    let cache = buffer(&cache);
    let listed = buffer(&[&[77, 78], &blocks[..]].concat());
    let (in_latents, behind) = (buffer(&in_latents), buffer(&behind));
    let out = buffer(&vec![0.0_f32; expected.len()]);
    let groups = attention_groups(new, heads, kv);
    let parts = attention_part_bytes(new, heads, kv, (pass_rows, groups));
    let parts = DEVICE.buffer(parts).unwrap();
    let tiles = HeadTiles::new(pass_rows, heads);
    let room = DEVICE.buffer(tiles.input_bytes(rank)).unwrap();
    let attention = Attention {
        sequence: SequenceRows {
            blocks: listed.whole(),
            blocks_at: 2,
            first_block: 0,
            cache: cache.whole(),
            kv,
            rows: new,
            first_row: 1,
            first_position: held,
        },
        heads,
        queries: in_latents.whole(),
        rotated: Some(behind.whole()),
        out: rows(&out, pass_rows),
        parts: parts.whole(),
        groups,
        scale: scale as f32,
        window: None,
        softcap: None,
        temperature,
        sinks: None,
    };
    let mut pass = device.pass().unwrap();
    pass.attend(attention).unwrap();
    pass.barrier();
    pass.attended_latents(&[attention], tiles, (out.whole(), rank), room.whole())
        .unwrap();
    pass.finish().unwrap();
    // What is another's row is 0 in both.
    assert_close(&read(&out), &expected, 1e-4, &what);
    if pass_rows <= FEW_ROWS {
        // Bytes, then scales and sums, of each head without the other sequence's row, which never attends.
        let own = |words: Vec<u32>| {
            let (bytes, scales) = words.split_at(pass_rows * heads * rank / 4);
            let of = |words: &[u32], row: usize| -> Vec<u32> {
                let heads = words.chunks_exact(pass_rows * row);
                heads.flat_map(|head| head[row..].to_vec()).collect()
            };
            [of(bytes, rank / 4), of(scales, rank / 8)].concat()
        };
        let numbers = read(&out);
        let (mut expected, mut scales) = (Vec::new(), Vec::new());
        for head in numbers.chunks_exact(pass_rows * rank) {
            let words = packed(&buffer(head), pass_rows, rank);
            let (bytes, own_scales) = words.split_at(pass_rows * rank / 4);
            expected.extend_from_slice(bytes);
            scales.extend_from_slice(own_scales);
        }
        expected.extend(scales);
        let found = own(packed_in(&room, pass_rows * heads * rank));
        assert_eq!(found, own(expected), "{what}, to be multiplied");
    }
    words(&out)
}

#[test]
fn heads_are_multiplied_each_with_its_own_matrix() {
    let plain = DEVICE.clone().without_abilities();
    // Of Q8_0 a head of 48 x 96 has 4896 bytes.
    let narrow = DEVICE.clone().with_most_bound_bytes(80_000);
    for format in [GgmlType::F32, GgmlType::F16, GgmlType::Q8_0, GgmlType::Q4_0] {
        for count in [1, 3, FEW_ROWS, FEW_ROWS + 1, 70] {
            head_products(&DEVICE, format, 5, count);
            head_products(&plain, format, 5, count);
        }
    }
    for count in [1, 2, 10] {
        head_products(&narrow, GgmlType::Q8_0, 20, count);
    }
    // Some tiles after others.
    let slow = DEVICE.clone().with_most_part_flop(1);
    for count in [1, 3, 70] {
        head_products(&slow, GgmlType::Q8_0, 20, count);
    }
}

/// Of the products, rows of all heads are made.
fn head_products(device: &Device, format: GgmlType, heads: usize, count: usize) {
    let what = format!("{format}, {heads} heads, {count} rows");
    let (width, cols) = (48, 96);
    let mut random = Random(format.id().into());
    let bytes = random.blocks(format, heads * width * cols / format.block_len());
    let mut x = random.numbers(heads * count * cols);
    let is_quantized = !matches!(format, GgmlType::F32 | GgmlType::F16);
    if count <= FEW_ROWS && is_quantized {
        rounded_to_bytes(&mut x);
    }
    let matrix = cpu::Matrix::new(format, heads * width, cols, &bytes).unwrap();
    let mut expected = vec![0.0_f32; count * heads * width];
    let mut weights = vec![0.0; cols];
    for head in 0..heads {
        for column in 0..width {
            cpu::dequantize_row(matrix, head * width + column, &mut weights);
            for row in 0..count {
                let x = &x[at_head_after_head(count, head, row) * cols..][..cols];
                let sum: f64 = x.iter().zip(&weights).map(|(x, w)| f64::from(x * w)).sum();
                expected[(row * heads + head) * width + column] = sum as f32;
            }
        }
    }

    let tiles = HeadTiles::new(count, heads);
    let (weights, x, listed) = (buffer(&bytes), buffer(&x), buffer(&tiles.listed()));
    let room = DEVICE.buffer(tiles.input_bytes(cols)).unwrap();
    let out_room = DEVICE.buffer(tiles.input_bytes(width)).unwrap();
    let [made, out] = [(); 2].map(|()| buffer(&vec![7.0_f32; expected.len()]));
    let mut pass = device.pass().unwrap();
    let input = pass
        .head_input(tiles, x.whole(), cols, room.whole())
        .unwrap();
    pass.barrier();
    let matrix = Matrix {
        weights: weights.whole(),
        format,
        rows: heads * width,
        cols,
    };
    let product = HeadProduct {
        tiles,
        listed: listed.whole(),
        x: input,
        out: made.whole(),
    };
    pass.multiply_heads(matrix, product).unwrap();
    pass.barrier();
    pass.heads_to_rows(tiles, made.whole(), width, out.whole(), out_room.whole())
        .unwrap();
    pass.finish().unwrap();
    assert_close(&read(&out), &expected, 1e-5, &what);
    if count <= FEW_ROWS {
        let numbers = count * heads * width;
        let rounded = packed(&out, count, heads * width);
        assert_eq!(
            packed_in(&out_room, numbers),
            rounded,
            "{what}, to be multiplied"
        );
    }
}

#[test]
fn latents_without_kernels_are_refused() {
    for (kv, expected) in [
        (
            KvShape {
                head_dim: 608,
                ..SHAPE
            },
            "heads of 608 numbers (even, and at most 576)",
        ),
        (
            KvShape {
                values_in_keys: Some(40),
                ..SMALL
            },
            "latents of 40 numbers (a multiple of 16, and at most 512)",
        ),
    ] {
        let refused = kv.check().unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let q8 = GgmlType::Q8_0;
    let matrices = [(q8, 64, 64), (q8, 40, 64)];
    let refused = DEVICE.check_latents(96, 4, matrices);
    let refused = refused.unwrap_err().to_string();
    let expected = "heads of 40 numbers: it takes a multiple of 16";
    assert!(refused.contains(expected), "{refused}");
}
