//! Products of activations with weight matrices: prepares the activations once for all matrices that share
//! them, cuts the rows of the matrices into pieces, and runs the kernel of the pool's level on each.
//! Decides the sizes of pieces; the arithmetic is in the files of the levels.

use std::ops::Range;

use super::activations::{Form, QuantizedActivations};
use super::isa_level::Kind;
use super::matrix::Matrix;
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::product::{Activations, Product, TILE_ROWS};
use super::scalar;
use super::shared_slice::SharedSlice;
use super::thread_pool::ThreadPool;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512, sse41};

/// A product of a matrix with some of the rows of activations that it shares with other products.
pub struct RowsProduct<'a> {
    pub matrix: Matrix<'a>,
    /// Which rows of the activations.
    pub rows: Range<usize>,
    /// `rows.len()` rows of `matrix.rows()`.
    pub out: &'a mut [f32],
}

/// Multiplies: for each matrix of `outputs`, row `i` of its output (`n` rows of `matrix.rows()`) becomes the
/// matrix times row `i` of `x` (`n` rows of `matrix.cols()`, the same for all matrices).
///
/// Quantized weights are multiplied in integers with activations quantized to 8 bits (per 32, or per 256
/// for K-quants, as llama.cpp does); float weights with `x` as it is. Each element of a result is the same
/// to the bit whatever `n`, the other matrices and the number of threads.
///
/// # Panics
/// When the lengths of `x` and of the outputs are not those of the matrices.
pub fn matmul(pool: &ThreadPool, x: &[f32], n: usize, outputs: &mut [(Matrix<'_>, &mut [f32])]) {
    let mut products: Vec<RowsProduct<'_>> = outputs
        .iter_mut()
        .map(|(matrix, out)| RowsProduct {
            matrix: *matrix,
            rows: 0..n,
            out,
        })
        .collect();
    matmul_rows(pool, x, n, &mut products);
}

/// As [`matmul`], where each matrix is multiplied with rows of its own of `x` (`n` rows of `matrix.cols()`). All products are one job
/// for the threads, so that small ones do not wait for each other.
///
/// # Panics
/// When the lengths of `x` and of the outputs are not those of the matrices, and when `x` has fewer rows than a product names.
pub fn matmul_rows(pool: &ThreadPool, x: &[f32], n: usize, products: &mut [RowsProduct<'_>]) {
    let Some(cols) = products.first().map(|product| product.matrix.cols()) else {
        return;
    };
    assert_eq!(x.len(), n * cols, "activations for {n} rows of {cols}");
    for RowsProduct { matrix, rows, out } in products.iter() {
        assert_eq!(matrix.cols(), cols, "matrices that share activations");
        assert!(
            rows.start <= rows.end && rows.end <= n,
            "{rows:?} of {n} rows"
        );
        let n = rows.len();
        assert_eq!(out.len(), n * matrix.rows(), "outputs of {n} rows");
    }

    let mut quantized: Vec<(Form, QuantizedActivations)> = Vec::new();
    for product in products.iter() {
        let form = Form::of(product.matrix.ggml_type());
        if form != Form::Float && quantized.iter().all(|(known, _)| *known != form) {
            quantized.push((form, QuantizedActivations::new(pool, form, x, n, cols)));
        }
    }

    let products: Vec<Product<'_>> = products
        .iter_mut()
        .filter(|product| !product.rows.is_empty())
        .map(|RowsProduct { matrix, rows, out }| {
            let form = Form::of(matrix.ggml_type());
            let activations = match quantized.iter().find(|(known, _)| *known == form) {
                Some((_, all)) => Activations::Quantized(all.rows(rows.clone())),
                None => Activations::Float(&x[rows.start * cols..rows.end * cols]),
            };
            Product {
                matrix: *matrix,
                activations,
                n: rows.len(),
                out: SharedSlice::new(out),
            }
        })
        .collect();

    let rows: usize = products.iter().map(|product| product.matrix.rows()).sum();
    let piece_rows = piece_rows(rows, pool.threads());
    let pieces = |product: &Product<'_>| product.matrix.rows().div_ceil(piece_rows);
    pool.run(products.iter().map(pieces).sum(), &|piece| {
        let mut piece = piece;
        for product in &products {
            if piece < pieces(product) {
                let first = piece * piece_rows;
                let last = (first + piece_rows).min(product.matrix.rows());
                run(product, pool.level().kind(), first..last);
                return;
            }
            piece -= pieces(product);
        }
    });
}

/// Computes the outputs that belong to these weight rows.
fn run(product: &Product<'_>, kind: Kind, rows: Range<usize>) {
    match kind {
        Kind::Scalar => scalar::multiply(product, rows),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `IsaLevel` of this kind exists only on processors that have its instructions; pieces
        // are disjoint ranges of rows, so no other thread writes the columns of this one.
        Kind::Sse41 => unsafe { sse41::multiply(product, rows) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx2 => unsafe { avx2::multiply(product, rows) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::AvxVnni => unsafe { avx2::multiply_vnni(product, rows) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx512Vnni => unsafe { avx512::multiply(product, rows) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Kind::Neon => unsafe { neon::multiply(product, rows) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Kind::NeonDotprod => unsafe { neon::multiply_dotprod(product, rows) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Kind::NeonI8mm => unsafe { neon::multiply_i8mm(product, rows) },
    }
}

/// Enough pieces for threads of unequal speed to end together, few enough that handing them out costs
/// nothing beside computing them.
fn piece_rows(rows: usize, threads: usize) -> usize {
    const PIECES_PER_THREAD: usize = 8;
    let tiles = rows
        .div_ceil(TILE_ROWS)
        .div_ceil(threads * PIECES_PER_THREAD);
    tiles.max(1) * TILE_ROWS
}
