//! What becomes of rows between products: norms, gates, rounding to bytes.

use prima_vulkan::{ActivationFunction, FEW_ROWS, Norm, input_bytes};

use crate::support::{DEVICE, Random, assert_close, buffer, packed, packed_in, read, rows};

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
                assert_eq!(
                    packed_in(&room, count * width),
                    packed(&out, count, width),
                    "{what}"
                );
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

#[test]
fn gates_are_silu_gelu_and_clamped_swiglu() {
    let gate = [-90.0, -8.0, -1.0, -0.0, 0.3, 2.0, 30.0, 1e30];
    let up = [0.5, 2.0, 3.0, 1.0, -1.0, 15.0, -9.0, 1e-30];
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let gelu = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
        0.5 * x * (1.0 + inner.tanh())
    };
    let clamped = |gate: f64, up: f64| {
        let gate = gate.min(7.0);
        gate / (1.0 + (-1.702 * gate).exp()) * (up.clamp(-7.0, 7.0) + 1.0)
    };
    for (activation, function) in [
        (
            ActivationFunction::Silu,
            &(|gate, up| silu(gate) * up) as &dyn Fn(f64, f64) -> f64,
        ),
        (ActivationFunction::Gelu, &|gate, up| gelu(gate) * up),
        (ActivationFunction::ClampedSwiglu, &clamped),
    ] {
        let expected: Vec<f32> = gate
            .iter()
            .zip(&up)
            .map(|(&gate, &up)| function(f64::from(gate), f64::from(up)) as f32)
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
            assert_eq!(
                packed_in(&room, count * width),
                packed(&out, count, width),
                "{what}"
            );
        }
    }
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
