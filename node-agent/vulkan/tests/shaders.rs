//! Every kernel on a driver of Vulkan that computes on the processor (lavapipe), or with `PRIMA_TEST_GPU=1` on the first GPU, compared
//! with the same computed plainly. Buffers are exactly as large as what is in them, and what kernels must not read is poisoned.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "these are tests"
)]

use std::sync::LazyLock;

use half::f16;
use prima_gguf::GgmlType;
use prima_kernels as cpu;
use prima_vulkan::{
    ActivationFunction, Attention, Buffer, Device, FEW_ROWS, Facts, GpuKind, Gpus, HeadNorms,
    Heads, KV_POSITIONS, Matrix, Norm, Plain, Product, Rotation, Rows, SequenceRows,
    attention_groups, attention_part_bytes, has_kernels, input_bytes, kv_block_bytes,
};

/// One device for all tests: kernels are compiled once.
static DEVICE: LazyLock<Device> = LazyLock::new(|| {
    let gpus = Gpus::find().expect("Vulkan, with Debian's mesa-vulkan-drivers");
    let real = std::env::var_os("PRIMA_TEST_GPU").is_some();
    let wanted = |facts: &Facts| (facts.kind != GpuKind::Software) == real;
    let device = gpus.facts().position(wanted);
    let device = Device::open(&gpus, device.expect("a GPU, or lavapipe")).unwrap();
    eprintln!("{}: {:?}", device.facts().name, device.abilities());
    device
});

/// Reproducible numbers in -1..1 (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn numbers(&mut self, count: usize) -> Vec<f32> {
        let number = |_| (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        (0..count).map(number).collect()
    }

    /// Blocks of any bits, but with scales that are numbers: in all formats F16 numbers lie at even bytes, so the upper byte of each
    /// pair has its exponent kept small. What else these bytes are takes every value that it then can.
    fn blocks(&mut self, format: GgmlType, count: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..count * format.block_bytes())
            .map(|_| self.next() as u8)
            .collect();
        for block in bytes.chunks_exact_mut(format.block_bytes()) {
            for &at in scales_at(format) {
                let scale = f16::from_f32(0.01 + 0.001 * f32::from(block[at] % 16));
                block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
            match format {
                GgmlType::F32 => block.copy_from_slice(&self.numbers(1)[0].to_le_bytes()),
                GgmlType::F16 => {
                    block.copy_from_slice(&f16::from_f32(self.numbers(1)[0]).to_le_bytes())
                }
                GgmlType::BF16 => block.copy_from_slice(&self.numbers(1)[0].to_le_bytes()[2..]),
                GgmlType::Mxfp4 => block[0] = 118 + block[0] % 8,
                _ => {}
            }
        }
        bytes
    }
}

/// Where blocks have F16 numbers.
fn scales_at(format: GgmlType) -> &'static [usize] {
    match format {
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 | GgmlType::Iq4Nl | GgmlType::Iq4Xs => {
            &[0]
        }
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
        GgmlType::Q2K => &[80, 82],
        GgmlType::Q3K => &[108],
        GgmlType::Q6K => &[208],
        _ => &[],
    }
}

fn buffer<T: Plain>(numbers: &[T]) -> Buffer {
    let buffer = DEVICE.buffer(size_of_val(numbers) as u64).unwrap();
    DEVICE.upload(buffer.whole(), numbers).unwrap();
    buffer
}

fn read(buffer: &Buffer) -> Vec<f32> {
    let mut numbers = vec![0.0; buffer.bytes() as usize / 4];
    let pass = DEVICE.pass().unwrap();
    pass.finish_reading(buffer.whole(), &mut numbers).unwrap();
    numbers
}

fn rows(buffer: &Buffer, count: usize) -> Rows<'_> {
    Rows {
        slice: buffer.whole(),
        count,
    }
}

/// That numbers are as expected, to within `bound` of the largest of them.
#[track_caller]
fn assert_close(found: &[f32], expected: &[f32], bound: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected
        .iter()
        .fold(0.0_f32, |most, number| most.max(number.abs()));
    assert!(
        largest > 0.0 && largest.is_finite(),
        "{what}: nothing to compare"
    );
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs() / largest;
        assert!(off <= bound, "{what}, number {i}: {found} for {expected}");
    }
}

/// Products differ by the order of sums only, since both sides multiply the same weights and numbers.
const SUMS: f32 = 1e-5;
/// Matrix units multiply weights and numbers of F16.
const HALVES: f32 = 1e-3;

/// Makes numbers of what they are rounded to, in sixteens as kernels do it: rounded again, they stay.
fn rounded_to_bytes(numbers: &mut [f32]) {
    for sixteen in numbers.chunks_mut(16) {
        let largest = sixteen.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        for x in sixteen {
            let byte = (*x * (127.0 / largest)).round();
            *x = byte * (largest / 127.0);
        }
    }
}

fn product(device: &Device, format: GgmlType, (matrix_rows, cols): (usize, usize), count: usize) {
    let mut random = Random(format.id().into());
    let bytes = random.blocks(format, matrix_rows * cols / format.block_len());
    let (mut x, bias) = (random.numbers(count * cols), random.numbers(matrix_rows));
    if count <= FEW_ROWS && !matches!(format, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16) {
        rounded_to_bytes(&mut x);
    }
    let matrix = cpu::Matrix::new(format, matrix_rows, cols, &bytes).unwrap();
    let mut expected = Vec::new();
    let mut unpacked = vec![vec![0.0; cols]; matrix_rows];
    for (row, out) in unpacked.iter_mut().enumerate() {
        cpu::dequantize_row(matrix, row, out);
    }
    for x in x.chunks_exact(cols) {
        for (weights, bias) in unpacked.iter().zip(&bias) {
            let sum: f64 = x.iter().zip(weights).map(|(x, w)| f64::from(x * w)).sum();
            expected.push(2.0 + 0.5 * (sum as f32 + bias));
        }
    }
    let (weights, x, bias) = (buffer(&bytes), buffer(&x), buffer(&bias));
    let out = buffer(&vec![2.0_f32; count * matrix_rows]);
    let room = DEVICE.buffer(input_bytes(count, cols)).unwrap();
    let mut pass = device.pass().unwrap();
    let input = pass.input(rows(&x, count), cols, room.whole()).unwrap();
    pass.barrier();
    let on_gpu = Matrix {
        weights: weights.whole(),
        format,
        rows: matrix_rows,
        cols,
    };
    let product = Product {
        x: input,
        out: out.whole(),
        bias: Some(bias.whole()),
        add: Some(0.5),
    };
    pass.multiply(on_gpu, product).unwrap();
    pass.finish().unwrap();
    let what = format!("{format}, {count} rows times {matrix_rows} x {cols}");
    // Rows of F16 weights are many sooner than those of quantized ones.
    let many = match format {
        GgmlType::F32 | GgmlType::BF16 => false,
        GgmlType::F16 => count > FEW_ROWS / 2,
        _ => count > FEW_ROWS,
    };
    let bound = match many && device.abilities().matrix_units {
        true => HALVES,
        false => SUMS,
    };
    assert_close(&read(&out), &expected, bound, &what);
}

#[test]
fn products_of_every_format_for_one_few_and_many_rows() {
    for &format in GgmlType::ALL.iter().filter(|format| has_kernels(**format)) {
        // Rows of an odd number of blocks, so that they begin at any byte; no multiples of the tiles' sizes.
        let cols = if format.block_len() == 256 { 768 } else { 96 };
        for count in [1, 3, FEW_ROWS, FEW_ROWS + 1, 70] {
            product(&DEVICE, format, (67, cols), count);
        }
    }
}

/// Of rows and of the matrix.
#[test]
fn several_tiles_are_multiplied() {
    for (format, cols) in [
        (GgmlType::Q4K, 768),
        (GgmlType::Q8_0, 96),
        (GgmlType::F16, 48),
    ] {
        product(&DEVICE, format, (300, cols), 200);
    }
}

/// Rows so long that threads go on to further parts; of Q8_0, an odd number of blocks.
#[test]
fn long_rows_are_multiplied() {
    for (format, cols) in [
        (GgmlType::Q4K, 2304),
        (GgmlType::Q6K, 2304),
        (GgmlType::Q8_0, 2080),
        (GgmlType::F16, 1040),
    ] {
        for count in [1, 3] {
            product(&DEVICE, format, (5, cols), count);
        }
    }
}

/// What not every GPU has is done without where it lacks.
#[test]
fn products_without_abilities() {
    let plain = DEVICE.clone().without_abilities();
    for &format in GgmlType::ALL.iter().filter(|format| has_kernels(**format)) {
        let cols = if format.block_len() == 256 { 256 } else { 96 };
        for count in [1, 3, 70] {
            product(&plain, format, (67, cols), count);
        }
    }
}

#[test]
fn rows_of_sixteen_more_than_a_step_are_whole() {
    for count in [1, FEW_ROWS + 1] {
        product(&DEVICE, GgmlType::F16, (5, 48), count);
    }
}

#[test]
fn a_matrix_larger_than_a_binding_is_multiplied_in_parts() {
    // Rows of 612 bytes: 64 of them are 9 times 4,352, where a part can begin.
    let narrow = DEVICE.clone().with_most_bound_bytes(50_000);
    for count in [1, 5, FEW_ROWS + 1] {
        product(&narrow, GgmlType::Q8_0, (300, 576), count);
    }
}

#[test]
fn norms_of_rows_and_heads() {
    for (width, count) in [(64, 12), (576, 3), (4096, 1)] {
        let mut random = Random(width as u64);
        let (x, weight) = (random.numbers(width * count), random.numbers(width));
        let mut normed = Vec::new();
        for row in x.chunks_exact(width) {
            let mean = row.iter().map(|x| f64::from(x * x)).sum::<f64>() / width as f64;
            let factor = 1.0 / (mean + 1e-5).sqrt();
            normed.extend(
                row.iter()
                    .zip(&weight)
                    .map(|(x, w)| (f64::from(x * w) * factor) as f32),
            );
        }
        let (x, weight) = (buffer(&x), buffer(&weight));
        for add in [None, Some(0.25)] {
            let out = buffer(&vec![3.0_f32; width * count]);
            let norm = Norm {
                weight: weight.whole(),
                width,
                x: rows(&x, count),
                out: out.whole(),
                epsilon: 1e-5,
                add,
            };
            let room = DEVICE.buffer(input_bytes(count, width)).unwrap();
            if add.is_none() {
                let mut pass = DEVICE.pass().unwrap();
                pass.norm_input(norm, room.whole()).unwrap();
                pass.finish().unwrap();
                let what = format!("width {width}, to be multiplied");
                assert_close(&read(&out), &normed, 1e-6, &what);
                assert_eq!(words(&room), packed(&out, count, width), "{what}");
            }
            let mut pass = DEVICE.pass().unwrap();
            pass.norm(norm).unwrap();
            pass.finish().unwrap();
            let expected: Vec<f32> = match add {
                None => normed.clone(),
                Some(scale) => normed.iter().map(|normed| 3.0 + scale * normed).collect(),
            };
            assert_close(
                &read(&out),
                &expected,
                1e-6,
                &format!("width {width}, {add:?}"),
            );
        }
    }
}

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
fn gates_are_silu_and_gelu() {
    let gate = [-90.0, -8.0, -1.0, -0.0, 0.3, 2.0, 30.0, 1e30];
    let up = [0.5, 2.0, 3.0, 1.0, -1.0, 1.5, 1.0, 1e-30];
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let gelu = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
        0.5 * x * (1.0 + inner.tanh())
    };
    for (activation, function) in [
        (ActivationFunction::Silu, &silu as &dyn Fn(f64) -> f64),
        (ActivationFunction::Gelu, &gelu),
    ] {
        let expected: Vec<f32> = gate
            .iter()
            .zip(&up)
            .map(|(&gate, &up)| (function(f64::from(gate)) * f64::from(up)) as f32)
            .collect();
        // Few rows, and many.
        for count in [2, FEW_ROWS + 1] {
            let width = 2 * gate.len();
            let repeated = |numbers: [f32; 8]| numbers.repeat(2 * count);
            let (out, up) = (buffer(&repeated(gate)), buffer(&repeated(up)));
            let room = DEVICE.buffer(input_bytes(count, width)).unwrap();
            let mut pass = DEVICE.pass().unwrap();
            let gate = rows(&out, count);
            pass.gate_input(activation, gate, up.whole(), width, room.whole())
                .unwrap();
            pass.finish().unwrap();
            let what = format!("{activation:?}, {count} rows");
            assert_close(&read(&out), &expected.repeat(2 * count), 1e-6, &what);
            assert_eq!(words(&room), packed(&out, count, width), "{what}");
        }
    }
}

/// What rows become that are only rounded to bytes.
fn packed(numbers: &Buffer, count: usize, width: usize) -> Vec<u32> {
    let room = DEVICE.buffer(input_bytes(count, width)).unwrap();
    let mut pass = DEVICE.pass().unwrap();
    pass.input(rows(numbers, count), width, room.whole())
        .unwrap();
    pass.finish().unwrap();
    words(&room)
}

fn words(room: &Buffer) -> Vec<u32> {
    // A buffer is never empty, even if it was asked to be.
    if room.bytes() <= 4 {
        return Vec::new();
    }
    read(room).into_iter().map(f32::to_bits).collect()
}

#[test]
fn rows_are_rounded_to_the_nearest_bytes() {
    let (count, width) = (3, 48);
    let numbers = Random(7).numbers(count * width);
    let words = packed(&buffer(&numbers), count, width);
    let (bytes, scales) = words.split_at(count * width / 4);
    for (i, sixteen) in numbers.chunks(16).enumerate() {
        let largest = sixteen.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let [scale, sum] = [2 * i, 2 * i + 1].map(|at| f32::from_bits(scales[at]));
        assert!((scale - largest / 127.0).abs() <= 1e-6 * largest);
        let mut total = 0.0;
        for (j, number) in sixteen.iter().enumerate() {
            let word = bytes[4 * i + j / 4].to_le_bytes();
            let rounded = scale * f32::from(word[j % 4] as i8);
            assert!((rounded - number).abs() <= 0.51 * scale, "{number}");
            total += rounded;
        }
        assert!((sum - total).abs() <= 1e-5, "{sum} for {total}");
    }
}

/// What an attention is tried with.
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Positions held, then rows that come.
    held: usize,
    rows: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    temperature: Option<(f32, usize)>,
}

#[test]
fn attention_sees_what_it_should() {
    let plain = Case {
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        held: 0,
        rows: 1,
        window: None,
        softcap: None,
        temperature: None,
    };
    for case in [
        Case { ..plain },
        Case { held: 63, ..plain },
        Case { held: 64, ..plain },
        Case {
            held: 200,
            rows: 70,
            ..plain
        },
        Case {
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            held: 5,
            rows: 40,
            ..plain
        },
        Case {
            heads: 2,
            kv_heads: 2,
            head_dim: 256,
            held: 100,
            rows: 3,
            ..plain
        },
        Case {
            head_dim: 8,
            held: 70,
            ..plain
        },
        Case {
            head_dim: 136,
            held: 70,
            rows: 2,
            ..plain
        },
        Case {
            heads: 16,
            kv_heads: 1,
            head_dim: 96,
            held: 70,
            rows: 2,
            ..plain
        },
        Case {
            held: 300,
            rows: 30,
            window: Some(20),
            ..plain
        },
        Case {
            held: 130,
            rows: 5,
            window: Some(1),
            ..plain
        },
        // Few rows, and so many groups that each takes all blocks.
        Case {
            heads: 32,
            kv_heads: 32,
            held: 130,
            rows: 9,
            ..plain
        },
        // Parts of several blocks, the last of fewer.
        Case {
            held: 33 * 64,
            ..plain
        },
        Case {
            held: 2500,
            rows: 3,
            window: Some(2200),
            ..plain
        },
        Case {
            held: 20,
            rows: 9,
            softcap: Some(0.5),
            ..plain
        },
        Case {
            held: 90,
            rows: 20,
            temperature: Some((0.3, 16)),
            ..plain
        },
    ] {
        attention(&case);
    }
}

fn attention(case: &Case) {
    let Case {
        heads,
        kv_heads,
        head_dim,
        held,
        rows: new,
        window,
        softcap,
        temperature,
    } = *case;
    let what = format!("{heads} heads of {head_dim}, {held} + {new}, window {window:?}");
    let (width, end) = (kv_heads * head_dim, held + new);
    let mut random = Random((held + heads) as u64);
    let queries: Vec<f32> = random
        .numbers(new * heads * head_dim)
        .iter()
        .map(|x| 3.0 * x)
        .collect();
    // Rounded to F16, since the cache is of that.
    let mut halves = || -> Vec<f32> {
        let numbers = random.numbers(end * width);
        numbers.iter().map(|x| f16::from_f32(*x).to_f32()).collect()
    };
    let (keys, values) = (halves(), halves());
    let scale = 0.4;
    let mut expected = vec![0.0_f32; queries.len()];
    for row in 0..new {
        let position = held + row;
        let factor = temperature.map_or(1.0, |(t, n): (f32, usize)| {
            1.0 + f64::from(t) * ((position / n) as f64 + 1.0).ln()
        });
        let from = (position + 1).saturating_sub(window.unwrap_or(usize::MAX));
        for head in 0..heads {
            let query = &queries[(row * heads + head) * head_dim..][..head_dim];
            let at = |numbers: &[f32], position: usize| -> Vec<f32> {
                numbers[position * width + head / (heads / kv_heads) * head_dim..][..head_dim]
                    .to_vec()
            };
            let weights: Vec<f64> = (from..=position)
                .map(|seen| {
                    let key = at(&keys, seen);
                    let dot: f64 = query.iter().zip(&key).map(|(q, k)| f64::from(q * k)).sum();
                    let score = dot * scale * factor;
                    let cap = softcap.map(f64::from);
                    cap.map_or(score, |cap| cap * (score / cap).tanh()).exp()
                })
                .collect();
            let sum: f64 = weights.iter().sum();
            for (seen, weight) in (from..=position).zip(&weights) {
                let out = &mut expected[(row * heads + head) * head_dim..][..head_dim];
                for (out, value) in out.iter_mut().zip(at(&values, seen)) {
                    *out += (weight / sum) as f32 * value;
                }
            }
        }
    }

    // Blocks lie in any order, and what a window has left behind is not there.
    let first_block = (held + 1).saturating_sub(window.unwrap_or(usize::MAX)) / KV_POSITIONS;
    let blocks: Vec<u32> = (0..(end.div_ceil(KV_POSITIONS) - first_block) as u32)
        .rev()
        .collect();
    let bytes = kv_block_bytes(kv_heads, head_dim) as usize;
    // Not a number, wherever nothing is written.
    let cache = buffer(&vec![0xff_u8; blocks.len() * bytes]);
    let listed = buffer(&[&[77, 78], &blocks[..]].concat());
    let sequence = |rows: usize, first_row: usize, first_position: usize| SequenceRows {
        blocks: listed.whole(),
        blocks_at: 2,
        first_block,
        cache: cache.whole(),
        kv_heads,
        head_dim,
        rows,
        first_row,
        first_position,
    };
    let kept = first_block * KV_POSITIONS;
    let (keys, values) = (
        buffer(&keys[kept * width..]),
        buffer(&values[kept * width..]),
    );
    // Of a pass in which another sequence has the first row.
    let in_pass = buffer(&[vec![f32::NAN; heads * head_dim], queries].concat());
    let out = buffer(&vec![0.0_f32; (new + 1) * heads * head_dim]);
    let groups = attention_groups(new, heads, kv_heads);
    let pass_rows = new + 1;
    let parts = attention_part_bytes(new, heads, head_dim, (pass_rows, groups));
    let parts = DEVICE.buffer(parts).unwrap();
    let room = DEVICE
        .buffer(input_bytes(pass_rows, heads * head_dim))
        .unwrap();
    let mut pass = DEVICE.pass().unwrap();
    if held > kept {
        append(&mut pass, sequence(held - kept, 0, kept), &keys, &values);
    }
    append(&mut pass, sequence(new, held - kept, held), &keys, &values);
    let attention = Attention {
        sequence: sequence(new, 1, held),
        heads,
        queries: in_pass.whole(),
        out: rows(&out, pass_rows),
        parts: parts.whole(),
        groups,
        scale: scale as f32,
        window,
        softcap,
        temperature,
    };
    pass.attend(attention).unwrap();
    pass.barrier();
    let width = heads * head_dim;
    pass.attended(&[attention], rows(&out, pass_rows), width, room.whole())
        .unwrap();
    pass.finish().unwrap();
    let found = read(&out);
    assert!(
        found[..heads * head_dim].iter().all(|x| *x == 0.0),
        "another's row"
    );
    assert_close(&found[heads * head_dim..], &expected, 1e-4, &what);
    if pass_rows <= FEW_ROWS {
        // Bytes, then scales and sums, without those of the other sequence's row, which never attends.
        let own = |words: Vec<u32>| {
            let (bytes, scales) = words.split_at(pass_rows * width / 4);
            [&bytes[width / 4..], &scales[width / 8..]].concat()
        };
        let expected = own(packed(&out, pass_rows, width));
        assert_eq!(own(words(&room)), expected, "{what}, to be multiplied");
    }
}

/// Keys and values as they are, each behind those before.
fn append<'a>(
    pass: &mut prima_vulkan::Pass<'a>,
    sequence: SequenceRows<'a>,
    keys: &'a Buffer,
    values: &'a Buffer,
) {
    pass.prepare_heads(Heads {
        sequence,
        heads: 0,
        queries: keys.whole(),
        keys: keys.whole(),
        values: values.whole(),
        norms: None,
        rotation: None,
    })
    .unwrap();
    pass.barrier();
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
