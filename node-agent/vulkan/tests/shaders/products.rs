//! Products of rows with weights.

use half::f16;
use prima_gguf::GgmlType;
use prima_kernels as cpu;
use prima_vulkan::{
    Device, FEW_ROWS, HeadProduct, HeadTiles, Matrix, Product, has_kernels, input_bytes,
};

use crate::support::{DEVICE, Random, assert_close, buffer, open, read, rounded_to_bytes, rows};

/// Products differ by the order of sums only, since both sides multiply the same weights and numbers.
const SUMS: f32 = 1e-5;
/// Matrix units multiply weights and numbers of F16.
const HALVES: f32 = 1e-3;

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

/// Of rows that are many, which go through the loops with the most turns (`multiply_tile.wgsl`). Sums of whole numbers are exact.
#[test]
fn rows_of_65536_columns_are_multiplied_whole() {
    let (cols, count) = (1 << 16, FEW_ROWS + 1);
    let block = [&f16::ONE.to_le_bytes()[..], &[1; 32]].concat();
    let weights = buffer(&block.repeat(cols / 32));
    let x = buffer(&vec![1.0_f32; count * cols]);
    let out = buffer(&vec![0.0_f32; count]);
    let room = DEVICE.buffer(input_bytes(count, cols)).unwrap();
    let mut pass = DEVICE.pass().unwrap();
    let input = pass.input(rows(&x, count), cols, room.whole()).unwrap();
    let matrix = Matrix {
        weights: weights.whole(),
        format: GgmlType::Q8_0,
        rows: 1,
        cols,
    };
    let product = Product {
        x: input,
        out: out.whole(),
        bias: None,
        add: None,
    };
    pass.multiply(matrix, product).unwrap();
    pass.finish().unwrap();
    assert_eq!(read(&out), vec![cols as f32; count]);
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
fn a_product_with_much_to_do_is_made_in_parts() {
    // Of 7 rows of the matrix, or as many as there have to be, and of 70 others, in two tiles of 64.
    let slow = DEVICE.clone().with_most_part_flop(7 * 2 * 128 * 576);
    product(&slow, GgmlType::Q8_0, (300, 576), 70);
}

#[test]
fn parts_of_a_pass_have_so_much_to_do() {
    const WIDTH: usize = 16;
    const HEADS: usize = 64;
    let flop = 2 * (WIDTH * WIDTH) as u64;
    // One of its own, whose timeline knows no other pass.
    let device = open().with_most_part_flop(2 * flop);
    let numbers = |count: usize| device.buffer(4 * count as u64).unwrap();
    let (weights, x, out) = (numbers(WIDTH * WIDTH), numbers(WIDTH), numbers(WIDTH));
    let room = device.buffer(input_bytes(1, WIDTH)).unwrap();
    device.start_timeline().unwrap();
    let mut pass = device.pass().unwrap();
    let input = pass.input(rows(&x, 1), WIDTH, room.whole()).unwrap();
    let matrix = Matrix {
        weights: weights.whole(),
        format: GgmlType::F32,
        rows: WIDTH,
        cols: WIDTH,
    };
    for _ in 0..5 {
        pass.barrier();
        let product = Product {
            x: input,
            out: out.whole(),
            bias: None,
            add: None,
        };
        pass.multiply(matrix, product).unwrap();
    }
    pass.finish().unwrap();
    // Of two products, two, and one.
    assert_eq!(device.end_timeline().unwrap().computed.len(), 3);

    // Heads, each of them a tile with as much to do.
    let tiles = HeadTiles::new(1, HEADS);
    let listed = tiles.listed();
    let listed_there = device.buffer(4 * listed.len() as u64).unwrap();
    device.upload(listed_there.whole(), &listed).unwrap();
    let (weights, x) = (numbers(HEADS * WIDTH * WIDTH), numbers(HEADS * WIDTH));
    let out = numbers(HEADS * WIDTH);
    let room = device.buffer(tiles.input_bytes(WIDTH)).unwrap();
    device.start_timeline().unwrap();
    let mut pass = device.pass().unwrap();
    let input = pass.head_input(tiles, x.whole(), WIDTH, room.whole());
    pass.barrier();
    let matrix = Matrix {
        weights: weights.whole(),
        rows: HEADS * WIDTH,
        ..matrix
    };
    let product = HeadProduct {
        tiles,
        listed: listed_there.whole(),
        x: input.unwrap(),
        out: out.whole(),
    };
    pass.multiply_heads(matrix, product).unwrap();
    pass.finish().unwrap();
    // Of two, or as many as end where a slice may begin.
    let at_once = (device.alignment() as usize / 16).max(2);
    let parts = device.end_timeline().unwrap().computed.len();
    assert_eq!(parts, HEADS.div_ceil(at_once));
}
