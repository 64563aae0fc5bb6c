//! Matrix products: as close to the exact product as 8-bit activations allow, and the same bits whatever the batch, the pool
//! and the other matrices.

use prima_gguf::GgmlType;
use prima_kernels::{IsaLevel, Matrix, RowsProduct, ThreadPool, matmul, matmul_rows};

use crate::levels;
use crate::reference::{FORMATS, Random, Scales, random_weights, weights};

fn pool(threads: usize, level: IsaLevel) -> ThreadPool {
    ThreadPool::new(threads, level).unwrap()
}

fn product(pool: &ThreadPool, matrix: Matrix<'_>, x: &[f32]) -> Vec<f32> {
    let n = x.len() / matrix.cols();
    let mut out = vec![f32::NAN; n * matrix.rows()];
    matmul(pool, x, n, &mut [(matrix, &mut out)]);
    out
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Shapes with whole tiles and tails, one block and many, in units of the format's block for columns.
fn shapes(format: GgmlType) -> Vec<(usize, usize)> {
    let block = format.block_len();
    let unit = if block == 256 { 256 } else { 32 };
    let mut shapes: Vec<(usize, usize)> = [
        // The first two are all that emulated processors take.
        (1, 1),
        (17, 2),
        (12, 2),
        (15, 2),
        (16, 3),
        (24, 2),
        (33, 9),
        (50, 18),
        // Pieces of two tiles for two threads, and one of a tile and what is left.
        (311, 1),
    ]
    .map(|(rows, blocks)| (rows, blocks * unit))
    .to_vec();
    if block == 1 {
        shapes.extend([(5, 1), (18, 31), (16, 33), (20, 300)]);
    }
    if block == 32 {
        // The width of gpt-oss, which blocks of 256 do not divide.
        shapes.push((17, 2880));
    }
    shapes
}

/// The level names, for running these tests as on another processor.
#[test]
fn levels_are_named() {
    let names: Vec<&str> = IsaLevel::available().iter().map(IsaLevel::name).collect();
    println!("levels: {}", names.join(" "));
    assert_eq!(names[0], "scalar");
}

#[test]
fn products_are_exact_but_for_quantized_activations() {
    are_exact(usize::MAX);
}

/// A part of that, for processors that are emulated.
#[test]
fn products_of_a_few_rows_are_exact_but_for_that() {
    are_exact(2);
}

/// Of so many shapes.
fn are_exact(most: usize) {
    let mut random = Random(2);
    for level in levels() {
        let pool = pool(2, level);
        for format in FORMATS {
            for (rows, cols) in shapes(format).into_iter().take(most) {
                let n = 1 + random.below(12);
                let bytes = random_weights(&mut random, format, rows * cols, Scales::Usual);
                let x = random.units(n * cols);
                let out = product(&pool, Matrix::new(format, rows, cols, &bytes).unwrap(), &x);
                let w = weights(format, &bytes);
                for i in 0..n {
                    for row in 0..rows {
                        let (mut exact, mut bound) = (0.0, 0.0);
                        for col in 0..cols {
                            let (w, x) = (w[row * cols + col], f64::from(x[i * cols + col]));
                            exact += w * x;
                            bound += activation_error(format) * w.abs() + 1e-6 * (w * x).abs();
                        }
                        let got = f64::from(out[i * rows + row]);
                        assert!(
                            (got - exact).abs() <= bound + 1e-6,
                            "{level} {format} {rows}x{cols} row {row} of {i}/{n}: {got} for {exact}, bound {bound}"
                        );
                    }
                }
            }
        }
    }
}

/// The most by which an activation of at most 1 is off after quantization: half a step of 1/127, and the
/// rounding of the scale to half precision; twice that where minimums are multiplied by rounded sums.
fn activation_error(format: GgmlType) -> f64 {
    match format {
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => 0.0,
        _ => 2.0 * (0.5 / 127.0 + 1.0 / 2048.0),
    }
}

fn activations(random: &mut Random, scales: Scales, count: usize) -> Vec<f32> {
    let mut x = random.units(count);
    for (i, x) in x.iter_mut().enumerate() {
        *x = match scales {
            Scales::Usual => *x,
            Scales::Extreme => [-127.0, 127.0, 0.0, *x][random.below(4)],
            // The largest of every 32 makes a step of 1.
            Scales::Exact if i % 32 == 0 => 127.0,
            Scales::Exact => random.below(7) as f32 - 3.0,
        };
    }
    x
}

/// Where neither weights nor activations are rounded, only the sum is: plain Rust gives what the formula gives, and nothing is
/// missing, however many columns there are. (Its bits are those of all other levels, see below.)
#[test]
fn exact_products_are_the_formulas() {
    let mut random = Random(7);
    let pool = pool(2, IsaLevel::SCALAR);
    for format in FORMATS {
        for (rows, cols) in shapes(format) {
            let n = 3;
            let bytes = random_weights(&mut random, format, rows * cols, Scales::Exact);
            let x = activations(&mut random, Scales::Exact, n * cols);
            let out = product(&pool, Matrix::new(format, rows, cols, &bytes).unwrap(), &x);
            let w = weights(format, &bytes);
            for (i, got) in out.iter().enumerate() {
                let (row, x) = (i % rows, &x[i / rows * cols..][..cols]);
                let terms = w[row * cols..].iter().zip(x);
                let terms = terms.map(|(w, x)| w * f64::from(*x));
                let (exact, all) = terms.fold((0.0, 0.0), |(sum, all), term| {
                    (sum + term, all + term.abs())
                });
                let off = (f64::from(*got) - exact).abs();
                assert!(
                    off <= 1e-6 * all,
                    "{format} {rows}x{cols} {i}: {got} for {exact}, terms of {all}"
                );
            }
        }
    }
}

#[test]
fn products_have_the_same_bits_at_every_level_that_fuses() {
    let mut random = Random(3);
    let plain = pool(1, IsaLevel::SCALAR);
    // Plain Rust has the same bits on more threads, see below.
    let others = levels()
        .into_iter()
        .filter(|level| *level != IsaLevel::SCALAR);
    let others: Vec<_> = others.map(|level| (level, pool(2, level))).collect();
    for format in FORMATS {
        // Plain Rust fuses float products only where all processors of the architecture do.
        let scalar_fuses = format.block_len() > 1 || cfg!(target_arch = "aarch64");
        for scales in [Scales::Usual, Scales::Extreme, Scales::Exact] {
            for (rows, cols) in shapes(format) {
                for n in [1, 2, 9] {
                    let bytes = random_weights(&mut random, format, rows * cols, scales);
                    let x = activations(&mut random, scales, n * cols);
                    let matrix = Matrix::new(format, rows, cols, &bytes).unwrap();
                    let expected = product(&plain, matrix, &x);
                    for (level, pool) in &others {
                        let case = format!("{level} {format} {scales:?} {rows}x{cols} x{n}");
                        let got = product(pool, matrix, &x);
                        if level.fuses() && scalar_fuses || scales == Scales::Exact {
                            assert_eq!(bits(&got), bits(&expected), "{case}");
                        } else {
                            assert_rounds_as(&got, &expected, matrix, &x, &case);
                        }
                    }
                }
            }
        }
    }
}

/// Products and sums that are rounded by themselves are off by a few units in the last place of the largest terms.
fn assert_rounds_as(got: &[f32], expected: &[f32], matrix: Matrix<'_>, x: &[f32], case: &str) {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    let largest = weights(matrix.ggml_type(), matrix.bytes())
        .into_iter()
        .fold(0.0_f64, |largest, weight| largest.max(weight.abs()));
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let x = &x[i / rows * cols..][..cols];
        let sum: f64 = x.iter().map(|x| f64::from(x.abs())).sum();
        let off = (f64::from(*got) - f64::from(*expected)).abs();
        let bound = 5e-7 * largest * sum + f64::from(f32::MIN_POSITIVE);
        // Near the largest number, one rounding may overflow and the other not.
        let same = got == expected
            || !got.is_finite() && expected.abs() > f32::MAX / 1e3
            || !got.is_finite() && !expected.is_finite();
        assert!(same || off <= bound, "{case} {i}: {got} for {expected}");
    }
}

#[test]
fn a_row_has_the_same_bits_in_every_batch() {
    have_the_same_bits(1..=40);
}

/// A part of that, for processors that are emulated: sizes between which kernels change.
#[test]
fn a_row_has_the_same_bits_in_some_batches() {
    have_the_same_bits([1, 3, 9]);
}

/// A row in batches of these sizes.
fn have_the_same_bits(batches: impl IntoIterator<Item = usize> + Clone) {
    let mut random = Random(4);
    for level in levels() {
        for format in FORMATS {
            let (rows, cols) = (
                37,
                if format.block_len() == 256 {
                    1280
                } else {
                    1120
                },
            );
            let bytes = random_weights(&mut random, format, rows * cols, Scales::Usual);
            let matrix = Matrix::new(format, rows, cols, &bytes).unwrap();
            let most = batches.clone().into_iter().max().unwrap();
            let x = random.units(most * cols);
            let alone: Vec<u32> = x
                .chunks_exact(cols)
                .flat_map(|x| bits(&product(&pool(1, level), matrix, x)))
                .collect();
            for n in batches.clone() {
                for threads in [1, 3] {
                    let got = product(&pool(threads, level), matrix, &x[..n * cols]);
                    assert_eq!(bits(&got), alone[..n * rows], "{level} {format} x{n}");
                }
            }
        }
    }
}

#[test]
fn matrices_that_share_activations_do_not_change_each_other() {
    let mut random = Random(5);
    let cols = 768;
    let kinds: Vec<(GgmlType, usize, Vec<u8>)> = FORMATS
        .iter()
        .map(|format| {
            let rows = 1 + random.below(70);
            (
                *format,
                rows,
                random_weights(&mut random, *format, rows * cols, Scales::Usual),
            )
        })
        .collect();
    let x = random.units(3 * cols);
    for level in levels() {
        let pool = pool(3, level);
        let mut outs: Vec<Vec<f32>> = kinds
            .iter()
            .map(|(_, rows, _)| vec![0.0; 3 * rows])
            .collect();
        let mut outputs: Vec<(Matrix<'_>, &mut [f32])> = kinds
            .iter()
            .zip(&mut outs)
            .map(|((format, rows, bytes), out)| {
                (
                    Matrix::new(*format, *rows, cols, bytes).unwrap(),
                    out.as_mut_slice(),
                )
            })
            .collect();
        matmul(&pool, &x, 3, &mut outputs);
        for ((format, rows, bytes), out) in kinds.iter().zip(&outs) {
            let alone = product(&pool, Matrix::new(*format, *rows, cols, bytes).unwrap(), &x);
            assert_eq!(bits(out), bits(&alone), "{level} {format}");
        }
    }
}

#[test]
fn weights_may_begin_at_any_byte() {
    let mut random = Random(6);
    for level in levels() {
        let pool = pool(1, level);
        for format in FORMATS {
            let (rows, cols) = (18, 512);
            let bytes = random_weights(&mut random, format, rows * cols, Scales::Usual);
            for n in [1, 2] {
                let x = random.units(n * cols);
                let expected = product(&pool, Matrix::new(format, rows, cols, &bytes).unwrap(), &x);
                for shift in 1..4 {
                    let mut moved = vec![0xff; shift];
                    moved.extend_from_slice(&bytes);
                    let matrix = Matrix::new(format, rows, cols, &moved[shift..]).unwrap();
                    assert_eq!(
                        bits(&product(&pool, matrix, &x)),
                        bits(&expected),
                        "{level} {format} {n}"
                    );
                }
            }
        }
    }
}

#[test]
fn no_rows_and_no_activations_give_nothing() {
    let pool = pool(2, IsaLevel::detect());
    let none = Matrix::new(GgmlType::Q4_1, 0, 64, &[]).unwrap();
    assert!(product(&pool, none, &[1.0; 64]).is_empty());
    let bytes = vec![0; 40];
    let some = Matrix::new(GgmlType::Q4_1, 1, 64, &bytes).unwrap();
    assert!(product(&pool, some, &[]).is_empty());
    matmul(&pool, &[], 0, &mut []);
}

/// As experts are multiplied: none, one or several rows each, matrices of several formats.
#[test]
fn products_with_some_rows_have_the_bits_of_their_own() {
    let mut random = Random(11);
    const COLS: usize = 512;
    const ROWS: usize = 9;
    let x = random.units(ROWS * COLS);
    for level in levels() {
        for threads in [1, 3] {
            let pool = pool(threads, level);
            let ranges = [0..3, 3..3, 3..4, 4..9, 0..9, 8..9];
            let parts: Vec<_> = ranges
                .into_iter()
                .enumerate()
                .map(|(index, range)| {
                    let format = FORMATS[(index * 5 + threads) % FORMATS.len()];
                    let rows = 1 + random.below(70);
                    let bytes = random_weights(&mut random, format, rows * COLS, Scales::Usual);
                    (format, rows, range, bytes)
                })
                .collect();
            let matrix = |part: &(GgmlType, usize, std::ops::Range<usize>, Vec<u8>)| {
                bits(&product(
                    &pool,
                    Matrix::new(part.0, part.1, COLS, &part.3).unwrap(),
                    &x[part.2.start * COLS..part.2.end * COLS],
                ))
            };
            let expected: Vec<_> = parts.iter().map(matrix).collect();
            let mut outs: Vec<Vec<f32>> = parts
                .iter()
                .map(|part| vec![f32::NAN; part.1 * part.2.len()])
                .collect();
            let mut products: Vec<_> = parts
                .iter()
                .zip(&mut outs)
                .map(|((format, rows, range, bytes), out)| RowsProduct {
                    matrix: Matrix::new(*format, *rows, COLS, bytes).unwrap(),
                    rows: range.clone(),
                    out,
                })
                .collect();
            matmul_rows(&pool, &x, ROWS, &mut products);
            for (out, expected) in outs.iter().zip(expected) {
                assert_eq!(bits(out), expected, "{level} on {threads}");
            }
        }
    }
}
