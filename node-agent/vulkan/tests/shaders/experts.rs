//! Mixtures of experts: which are chosen, and what they make of rows.

use prima_gguf::GgmlType;
use prima_kernels as cpu;
use prima_vulkan::{
    ActivationFunction, Device, ExpertProduct, ExpertRows, ExpertTiles, FEW_ROWS, Gating, Matrix,
    Mixture, Routing, SharedExpert, has_kernels, input_bytes,
};

use crate::support::{DEVICE, Random, assert_close, buffer, read, rounded_to_bytes, rows, words};

const PLAIN: cpu::Routing<'static> = cpu::Routing {
    experts: 40,
    used: 6,
    groups: None,
    gating: cpu::Gating::Softmax,
    selection_bias: None,
    normalized: false,
    scale: 1.0,
};

#[test]
fn rows_choose_their_experts_as_on_the_processor() {
    let bias = Random(3).numbers(512);
    let groups = |count, used| Some(cpu::ExpertGroups { count, used });
    for routing in [
        PLAIN,
        cpu::Routing {
            normalized: true,
            scale: 2.5,
            ..PLAIN
        },
        // More experts than threads, and all that there are.
        cpu::Routing {
            experts: 512,
            used: 64,
            selection_bias: Some(&bias),
            ..PLAIN
        },
        cpu::Routing {
            experts: 1,
            used: 1,
            ..PLAIN
        },
        cpu::Routing {
            experts: 7,
            used: 7,
            gating: cpu::Gating::SoftmaxOfChosen,
            normalized: true,
            ..PLAIN
        },
        cpu::Routing {
            gating: cpu::Gating::SoftmaxOfChosen,
            selection_bias: Some(&bias[..40]),
            ..PLAIN
        },
        cpu::Routing {
            gating: cpu::Gating::Sigmoid,
            selection_bias: Some(&bias[..40]),
            groups: groups(8, 3),
            normalized: true,
            ..PLAIN
        },
        cpu::Routing {
            experts: 128,
            groups: groups(64, 3),
            ..PLAIN
        },
    ] {
        routed(&routing);
    }
}

fn routed(routing: &cpu::Routing<'_>) {
    let count = 37;
    let cpu::Routing { experts, used, .. } = *routing;
    let mut random = Random(experts as u64);
    let mut logits = random.numbers(count * experts);
    // Few numbers, so that many scores are equal; and rows in which all are.
    for logit in &mut logits {
        *logit = (*logit * 20.0).round() * 0.3;
    }
    logits[..2 * experts].fill(-3.0);
    let pool = cpu::ThreadPool::new(1, cpu::IsaLevel::SCALAR).unwrap();
    let mut expected = vec![cpu::ExpertChoice::default(); count * used];
    cpu::route(&pool, routing, &logits, &mut expected);

    let tiles = ExpertTiles::new(count, used, experts, [GgmlType::F32; 3]).unwrap();
    let parts = tiles.bytes().map(|bytes| DEVICE.buffer(bytes).unwrap());
    let to = expert_rows(tiles, &parts);
    let logits = buffer(&logits);
    let bias = routing.selection_bias.map(buffer);
    let mut pass = DEVICE.pass().unwrap();
    pass.route(
        to,
        Routing {
            logits: logits.whole(),
            selection_bias: bias.as_ref().map(|bias| bias.whole()),
            gating: match routing.gating {
                cpu::Gating::Softmax => Gating::Softmax,
                cpu::Gating::Sigmoid => Gating::Sigmoid,
                cpu::Gating::SoftmaxOfChosen => Gating::SoftmaxOfChosen,
            },
            groups: routing.groups.map(|groups| (groups.count, groups.used)),
            normalized: routing.normalized,
            scale: routing.scale,
        },
    )
    .unwrap();
    pass.finish().unwrap();
    let found = words(&parts[0]);
    let (chosen, weights): (Vec<u32>, Vec<f32>) = found
        .chunks_exact(2)
        .map(|choice| (choice[0], f32::from_bits(choice[1])))
        .unzip();
    let what = format!("{routing:?}");
    let numbers: Vec<u32> = expected.iter().map(|choice| choice.expert).collect();
    assert_eq!(chosen, numbers, "{what}");
    let expected: Vec<f32> = expected.iter().map(|choice| choice.weight).collect();
    assert_close(&weights, &expected, 1e-6, &what);
}

fn expert_rows(sizes: ExpertTiles, parts: &[prima_vulkan::Buffer; 4]) -> ExpertRows<'_> {
    let [choices, rows, places, tiles] = parts.each_ref().map(|part| part.whole());
    ExpertRows {
        sizes,
        choices,
        rows,
        places,
        tiles,
    }
}

/// A layer's experts: `used` of so many.
struct Layer {
    formats: [GgmlType; 3],
    experts: usize,
    used: usize,
    hidden: usize,
    width: usize,
    activation: ActivationFunction,
}

#[test]
fn experts_of_every_format_for_one_few_and_many_rows() {
    for &format in GgmlType::ALL.iter().filter(|format| has_kernels(**format)) {
        let layer = small(format);
        // With 5 experts, of which a row uses 2: few are up to 40 rows of quantized weights.
        for count in [1, 3, FEW_ROWS + 1, 70] {
            mixed(&DEVICE, &layer, count);
        }
    }
}

fn small(format: GgmlType) -> Layer {
    // Of formats in blocks of 32, an odd number of them in a row, so that rows begin at any byte.
    let (hidden, width) = match format.block_len() {
        256 => (256, 256),
        _ => (96, 160),
    };
    Layer {
        formats: [format; 3],
        experts: 5,
        used: 2,
        hidden,
        width,
        activation: ActivationFunction::Silu,
    }
}

/// Others than gate and up; experts that get no row; more tiles than one of an expert's rows; a clamped gate.
#[test]
fn experts_of_mixed_formats_and_uneven_shares() {
    for layer in [
        Layer {
            formats: [GgmlType::Q4K, GgmlType::Q4K, GgmlType::F16],
            hidden: 256,
            width: 256,
            ..small(GgmlType::Q4K)
        },
        Layer {
            experts: 2,
            used: 1,
            activation: ActivationFunction::ClampedSwiglu,
            ..small(GgmlType::Q8_0)
        },
        Layer {
            experts: 3,
            used: 3,
            activation: ActivationFunction::Gelu,
            ..small(GgmlType::Mxfp4)
        },
        Layer {
            experts: 300,
            used: 8,
            hidden: 32,
            width: 32,
            ..small(GgmlType::Q4_0)
        },
    ] {
        for count in [1, 2, 19, 200] {
            mixed(&DEVICE, &layer, count);
        }
    }
}

#[test]
fn experts_without_abilities_and_in_parts() {
    let plain = DEVICE.clone().without_abilities();
    // Of Q8_0 an expert of 96 x 160 has 16,320 bytes.
    let narrow = DEVICE.clone().with_most_bound_bytes(60_000);
    for device in [plain, narrow] {
        for count in [1, 9, 45] {
            mixed(&device, &small(GgmlType::Q8_0), count);
        }
    }
    // Some tiles after others, and of these some experts after others.
    let slow = DEVICE.clone().with_most_part_flop(1);
    for count in [1, 9, 200] {
        mixed(&slow, &small(GgmlType::Q8_0), count);
    }
    let slow_and_narrow = slow.with_most_bound_bytes(60_000);
    for count in [9, 45] {
        mixed(&slow_and_narrow, &small(GgmlType::Q8_0), count);
    }
    let tiny = DEVICE.clone().with_most_bound_bytes(16_000);
    let layer = small(GgmlType::Q8_0);
    let weights = DEVICE.buffer(5 * 16_320).unwrap();
    let matrix = Matrix {
        weights: weights.whole(),
        format: GgmlType::Q8_0,
        rows: layer.experts * layer.width,
        cols: layer.hidden,
    };
    let tiles = ExpertTiles::new(1, layer.used, layer.experts, layer.formats).unwrap();
    let parts = tiles.bytes().map(|bytes| DEVICE.buffer(bytes).unwrap());
    let (x, out) = (
        buffer(&vec![0.0_f32; layer.hidden]),
        buffer(&vec![0.0_f32; 2 * layer.width]),
    );
    let room = DEVICE.buffer(input_bytes(1, layer.hidden)).unwrap();
    let mut pass = tiny.pass().unwrap();
    let x = pass.input(rows(&x, 1), layer.hidden, room.whole()).unwrap();
    let product = ExpertProduct {
        x,
        is_grouped: false,
        out: out.whole(),
        bias: None,
    };
    let refused = pass.multiply_experts(expert_rows(tiles, &parts), matrix, product);
    let message = refused.err().unwrap().to_string();
    assert!(
        message.contains("experts of 160 x 96 Q8_0 weights (it sees 16000 bytes"),
        "{message}"
    );
    // What a file may ask for is refused before.
    let matrices = |width| {
        [(width, 96), (width, 96), (96, width)].map(|(rows, cols)| (GgmlType::Q8_0, rows, cols))
    };
    assert!(DEVICE.check_experts((2, 5), matrices(160)).is_ok());
    for (device, choice, width) in [
        (&tiny, (2, 5), 160),
        (&*DEVICE, (2, 600), 160),
        (&*DEVICE, (2, 5), 168),
        (&*DEVICE, (2, 5), 1 << 18),
    ] {
        assert!(device.check_experts(choice, matrices(width)).is_err());
    }
}

#[test]
fn more_experts_than_the_kernels_take_are_refused() {
    for (used, experts) in [(1, 513), (65, 128), (9, 8)] {
        let refused = ExpertTiles::new(1, used, experts, [GgmlType::F32; 3]);
        let message = refused.err().unwrap().to_string();
        assert!(
            message.contains(&format!("{used} of {experts} experts")),
            "{message}"
        );
    }
}

/// All of a mixture, from its rows' logits on, beside the same computed plainly.
fn mixed(device: &Device, layer: &Layer, count: usize) {
    let Layer {
        formats,
        experts,
        used,
        hidden,
        width,
        activation,
    } = *layer;
    let what = format!("{formats:?}, {used} of {experts} experts, {count} rows");
    let mut random = Random(count as u64 * 31 + experts as u64);
    let mut logits = random.numbers(count * experts);
    // Half of the rows have the same favourite, and some experts none.
    for row in logits.chunks_exact_mut(experts).step_by(2) {
        row[experts / 2] += 4.0;
    }
    let tiles = ExpertTiles::new(count, used, experts, formats).unwrap();
    let rounds = |format, bytes: u64| {
        bytes > 0 && !matches!(format, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16)
    };
    let mut x = random.numbers(count * hidden);
    // So small that gates are on their slopes.
    x.iter_mut().for_each(|x| *x *= 0.05);
    if rounds(formats[0], tiles.input_bytes(hidden)) {
        rounded_to_bytes(&mut x);
    }
    let shapes = [(width, hidden), (width, hidden), (hidden, width)];
    let matrices: Vec<Vec<u8>> = (formats.iter().zip(shapes))
        .map(|(format, (rows, cols))| {
            random.blocks(*format, experts * rows * cols / format.block_len())
        })
        .collect();
    let biases: Vec<Vec<f32>> = shapes
        .map(|(rows, _)| random.numbers(experts * rows))
        .to_vec();
    let (shared, shared_logits) = (random.numbers(count * hidden), random.numbers(count));

    // Plainly.
    let pool = cpu::ThreadPool::new(1, cpu::IsaLevel::SCALAR).unwrap();
    let routing = cpu::Routing {
        experts,
        used,
        normalized: true,
        scale: 1.5,
        ..PLAIN
    };
    let mut choices = vec![cpu::ExpertChoice::default(); count * used];
    cpu::route(&pool, &routing, &logits, &mut choices);
    let multiplied = |part: usize, expert: usize, x: &[f32]| -> Vec<f32> {
        let (rows, cols) = shapes[part];
        let matrix = cpu::Matrix::new(formats[part], experts * rows, cols, &matrices[part]);
        let matrix = matrix.unwrap();
        let mut weights = vec![0.0; cols];
        let products = (expert * rows..(expert + 1) * rows).map(|row| {
            cpu::dequantize_row(matrix, row, &mut weights);
            let sum: f64 = x.iter().zip(&weights).map(|(x, w)| f64::from(x * w)).sum();
            sum as f32 + biases[part][row]
        });
        products.collect()
    };
    let mut sums = vec![0.0; count * hidden];
    for row in 0..count {
        let own = &x[row * hidden..][..hidden];
        let out = &mut sums[row * hidden..][..hidden];
        for choice in &choices[row * used..][..used] {
            let expert = choice.expert as usize;
            let mut gate = multiplied(0, expert, own);
            let up = multiplied(1, expert, own);
            match activation {
                ActivationFunction::Silu => cpu::swiglu(&pool, &mut gate, &up),
                ActivationFunction::Gelu => cpu::geglu(&pool, &mut gate, &up),
                ActivationFunction::ClampedSwiglu => cpu::clamped_swiglu(&pool, &mut gate, &up),
            }
            if rounds(formats[2], tiles.gated_bytes(width)) {
                rounded_to_bytes(&mut gate);
            }
            let down = multiplied(2, expert, &gate);
            for (out, made) in out.iter_mut().zip(down) {
                *out += choice.weight * made;
            }
        }
    }
    // With a shared expert that counts in part, with one that counts in full, and without.
    let added = |add: f32, scale: f32, factor: &dyn Fn(usize) -> f32| -> Vec<f32> {
        let pairs = sums.iter().zip(&shared).enumerate();
        let numbers =
            pairs.map(|(i, (sum, shared))| add + scale * (sum + factor(i / hidden) * shared));
        numbers.collect()
    };
    let sigmoid = |row: usize| 1.0 / (1.0 + (-shared_logits[row]).exp());
    let expected = [
        added(2.0, 0.5, &sigmoid),
        added(0.0, 1.0, &|_| 1.0),
        added(2.0, 3.0, &|_| 0.0),
    ];

    // There.
    let parts = tiles.bytes().map(|bytes| DEVICE.buffer(bytes).unwrap());
    let to = expert_rows(tiles, &parts);
    let room = |bytes| DEVICE.buffer(bytes).unwrap();
    let numbers = |count: usize| room(4 * count as u64);
    let (logits, x) = (buffer(&logits), buffer(&x));
    let matrices: Vec<_> = matrices.iter().map(|bytes| buffer(bytes)).collect();
    let biases: Vec<_> = biases.iter().map(|bias| buffer(bias)).collect();
    let (shared, shared_logits) = (buffer(&shared), buffer(&shared_logits));
    let (gate, up) = (numbers(count * used * width), numbers(count * used * width));
    let made = numbers(count * used * hidden);
    let outs = [0, 1, 2].map(|_| buffer(&vec![2.0_f32; count * hidden]));
    let of_pass = room(input_bytes(count, hidden));
    let of_experts = room(tiles.input_bytes(hidden));
    let of_gated = room(tiles.gated_bytes(width));
    let matrix = |part: usize| Matrix {
        weights: matrices[part].whole(),
        format: formats[part],
        rows: experts * shapes[part].0,
        cols: shapes[part].1,
    };
    let mut pass = device.pass().unwrap();
    let routing = Routing {
        logits: logits.whole(),
        selection_bias: None,
        gating: Gating::Softmax,
        groups: None,
        normalized: true,
        scale: 1.5,
    };
    pass.route(to, routing).unwrap();
    let input = pass.input(rows(&x, count), hidden, of_pass.whole());
    pass.barrier();
    pass.group_by_expert(to).unwrap();
    let input = pass.expert_input(to, input.unwrap(), [formats[0]; 2], of_experts.whole());
    let input = input.unwrap();
    pass.barrier();
    for (part, out) in [&gate, &up].into_iter().enumerate() {
        let product = ExpertProduct {
            x: input,
            is_grouped: false,
            out: out.whole(),
            bias: Some(biases[part].whole()),
        };
        pass.multiply_experts(to, matrix(part), product).unwrap();
    }
    pass.barrier();
    let both = (gate.whole(), up.whole());
    let gated = pass.gate_experts(to, activation, both, width, (formats[2], of_gated.whole()));
    pass.barrier();
    let product = ExpertProduct {
        x: gated.unwrap(),
        is_grouped: true,
        out: made.whole(),
        bias: Some(biases[2].whole()),
    };
    pass.multiply_experts(to, matrix(2), product).unwrap();
    pass.barrier();
    let shared = |logits| SharedExpert {
        made: shared.whole(),
        logits,
    };
    let ways = [
        (Some(shared(Some(shared_logits.whole()))), Some(0.5)),
        (Some(shared(None)), None),
        (None, Some(3.0)),
    ];
    for ((shared, add), out) in ways.into_iter().zip(&outs) {
        let mixture = Mixture {
            made: made.whole(),
            width: hidden,
            shared,
            out: out.whole(),
            add,
        };
        pass.mix_experts(to, mixture).unwrap();
    }
    pass.finish().unwrap();
    // What is rounded to bytes after a sum may fall on the other side, now and then.
    let bound = match rounds(formats[2], tiles.gated_bytes(width)) {
        true => 1e-3,
        false => 1e-5,
    };
    for (out, expected) in outs.iter().zip(&expected) {
        assert_close(&read(out), expected, bound, &what);
    }
}
