//! What `Matrix` accepts, and that `dequantize_row` gives the numbers that the formats define.

use prima_gguf::GgmlType;
use prima_kernels::{Matrix, MatrixError, dequantize_row, supported};

use crate::reference::{FORMATS, Random, Scales, has_codebook, random_weights, weights};

#[test]
fn formats_without_a_codebook_dequantize_to_their_formulas() {
    let mut random = Random(1);
    for format in FORMATS {
        if has_codebook(format) {
            continue;
        }
        for scales in [Scales::Usual, Scales::Extreme, Scales::Exact] {
            let (rows, cols) = (7, 3 * 256);
            let bytes = random_weights(&mut random, format, rows * cols, scales);
            let matrix = Matrix::new(format, rows, cols, &bytes).unwrap();
            let exact = weights(format, &bytes);
            let mut row_out = vec![f32::NAN; cols];
            for row in 0..rows {
                dequantize_row(matrix, row, &mut row_out);
                for (col, (got, exact)) in row_out.iter().zip(&exact[row * cols..]).enumerate() {
                    // Two roundings of at most 2^-24 of the larger of the two terms.
                    let bound = 2e-7 * (exact.abs() + largest_term(format, &bytes));
                    assert!(
                        (f64::from(*got) - exact).abs() <= bound,
                        "{format} {scales:?} row {row} col {col}: {got} for {exact}"
                    );
                }
            }
        }
    }
}

/// Formats without minimums have one rounding, relative to the weight itself.
fn largest_term(format: GgmlType, bytes: &[u8]) -> f64 {
    match format {
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q2K | GgmlType::Q4K | GgmlType::Q5K => {
            weights(format, bytes)
                .iter()
                .fold(0.0, |largest, w| w.abs().max(largest))
        }
        _ => 0.0,
    }
}

#[test]
fn formats_without_kernels_are_refused_by_name() {
    for format in GgmlType::ALL {
        assert_eq!(supported(*format), FORMATS.contains(format), "{format}");
    }
    let error = Matrix::new(GgmlType::Q8K, 1, 256, &[0; 292]).err().unwrap();
    assert!(matches!(error, MatrixError::Unsupported { .. }));
    assert!(error.to_string().contains("Q8_K"), "{error}");
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let refused = |format, rows, cols, bytes: usize| {
        Matrix::new(format, rows, cols, &vec![0; bytes])
            .err()
            .unwrap()
    };
    assert!(matches!(
        refused(GgmlType::Q4_1, 1, 31, 20),
        MatrixError::Columns { .. }
    ));
    assert!(matches!(
        refused(GgmlType::Q4K, 1, 128, 144),
        MatrixError::Columns { .. }
    ));
    assert!(matches!(
        refused(GgmlType::F32, 1, 0, 0),
        MatrixError::Columns { .. }
    ));
    assert!(matches!(
        refused(GgmlType::Q4_1, 2, 32, 39),
        MatrixError::Length { .. }
    ));
    assert!(matches!(
        refused(GgmlType::Q4_1, 2, 32, 41),
        MatrixError::Length { .. }
    ));
    assert!(matches!(
        refused(GgmlType::Q4_1, usize::MAX / 2, 32, 40),
        MatrixError::TooLarge { .. }
    ));
    assert!(matches!(
        refused(GgmlType::Q4_1, 1, usize::MAX - 31, 40),
        MatrixError::TooLarge { .. }
    ));
    assert!(Matrix::new(GgmlType::Q6K, 0, 256, &[]).is_ok());
}
