//! Measures the matrix kernels, format by level: decode in GB/s of weights, beside the memory's own speed, and prefill in billions
//! of operations per second, beside what the processor does in registers. Prints a table in Markdown. `cargo bench -p prima-engine --bench kernels [FORMAT...]`,
//! `THREADS=n` for another number of threads than cores.

use std::hint::black_box;
use std::time::Instant;

use half::f16;
use prima_engine::kernels::{
    AttentionShape, BLOCK_POSITIONS, KvShape, Level, Matrix, SequenceAttention, ThreadPool,
    attention, limits, matmul, supported,
};
use prima_gguf::GgmlType;

/// Columns and rows of a feed-forward matrix of a 1B model.
const COLS: usize = 2048;
const ROWS: usize = 8192;
/// Rows of activations in a prefill.
const PREFILL: usize = 128;
/// Bytes that are read before the same are read again: more than caches hold.
const MEMORY: usize = 1 << 30;

fn main() {
    let threads = std::env::var("THREADS")
        .ok()
        .and_then(|threads| threads.parse().ok())
        .or_else(|| std::thread::available_parallelism().ok().map(Into::into))
        .unwrap_or(1);
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    let levels: Vec<ThreadPool> = Level::available()
        .into_iter()
        .filter_map(|level| ThreadPool::new(threads, level).ok())
        .collect();
    let columns = |cells: Vec<String>| println!("| {} |", cells.join(" | "));
    println!("{threads} threads. Decode in GB/s of weights, prefill in GOP/s.\n");
    let names = levels.iter().map(|pool| pool.level().name().to_owned());
    columns([String::new()].into_iter().chain(names).collect());
    columns(vec!["---".to_owned(); 1 + levels.len()]);
    let memory = vec![1_u64; MEMORY / 8];
    let limit = |pool| {
        let read = limits::read_bytes_per_second(pool, &memory);
        let multiplied = limits::byte_operations_per_second(pool);
        cell((read / 1e9, multiplied / 1e9))
    };
    let cells = levels.iter().map(limit);
    columns(["limit".to_owned()].into_iter().chain(cells).collect());
    drop(memory);
    let all = GgmlType::ALL.iter().copied();
    for format in all.filter(|format| supported(*format)) {
        if !wanted.is_empty() && !wanted.contains(&format.to_string()) {
            continue;
        }
        let weights = weights(format);
        let cells = levels
            .iter()
            .map(|pool| cell(matrix_product(pool, format, &weights)));
        columns([format.to_string()].into_iter().chain(cells).collect());
    }
    println!();
    for pool in &levels {
        println!(
            "attention, 32 heads on 8 of 64, {}: decode at 4096: {:.0} µs; prefill 512: {:.1} ms",
            pool.level(),
            attention_seconds(pool, 4095, 1) * 1e6,
            attention_seconds(pool, 0, 512) * 1e3,
        );
        println!(
            "an empty job, {}: {:.2} µs",
            pool.level(),
            dispatch_seconds(pool) * 1e6
        );
    }
}

/// The shortest of several runs, in seconds.
fn shortest(mut work: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut best = f64::MAX;
    let mut runs = 0;
    while runs < 3 || (begin.elapsed().as_secs_f64() < 0.6 && runs < 1000) {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

fn random_bytes(bytes: &mut [u8]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for bytes in bytes.chunks_mut(8) {
        // Xorshift (Marsaglia 2003).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.copy_from_slice(&state.to_le_bytes()[..bytes.len()]);
    }
}

/// As [`matrix_product`] and the limits, for people.
fn cell((decode, prefill): (f64, f64)) -> String {
    format!("{decode:.1}, {prefill:.0}")
}

/// Bytes of one matrix.
fn matrix_bytes(format: GgmlType) -> usize {
    ROWS * COLS / format.block_len() * format.block_bytes()
}

/// Matrices, of as many bytes together as [`MEMORY`].
fn weights(format: GgmlType) -> Vec<u8> {
    let mut weights = vec![0; MEMORY.next_multiple_of(matrix_bytes(format))];
    random_bytes(&mut weights);
    if matches!(format, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16) {
        // Normal numbers, neither huge nor tiny: subnormals, of which real weights have few, are slow.
        weights
            .iter_mut()
            .for_each(|byte| *byte = 0x2c | (*byte & 3));
    }
    if format == GgmlType::Mxfp4 {
        // The exponent.
        let blocks = weights.chunks_exact_mut(format.block_bytes());
        blocks.for_each(|block| block[0] = 0x78 | (block[0] & 3));
    }
    weights
}

/// GB/s of weights read at one row of activations; GOP/s at many.
fn matrix_product(pool: &ThreadPool, format: GgmlType, weights: &[u8]) -> (f64, f64) {
    let one = matrix_bytes(format);
    let copies = weights.len() / one;
    let x: Vec<f32> = (0..PREFILL * COLS).map(|i| (i as f32).sin()).collect();
    let mut out = vec![0.0; PREFILL * ROWS];
    let mut run = |copy: usize, n: usize| {
        let bytes = &weights[copy * one..][..one];
        if let Ok(matrix) = Matrix::new(format, ROWS, COLS, bytes) {
            matmul(
                pool,
                &x[..n * COLS],
                n,
                &mut [(matrix, &mut out[..n * ROWS])],
            );
        }
    };
    let decode = shortest(|| (0..copies).for_each(|copy| run(copy, 1)));
    let prefill = shortest(|| run(0, PREFILL));
    (
        weights.len() as f64 / decode / 1e9,
        2.0 * (ROWS * COLS * PREFILL) as f64 / prefill / 1e9,
    )
}

fn attention_seconds(pool: &ThreadPool, first_position: usize, rows: usize) -> f64 {
    let kv = KvShape {
        kv_heads: 8,
        head_dim: 64,
    };
    let shape = AttentionShape {
        heads: 32,
        kv,
        scale: 0.125,
    };
    let blocks = (first_position + rows).div_ceil(BLOCK_POSITIONS);
    let block: Vec<Vec<f16>> = vec![vec![f16::from_f32(0.25); kv.block_len()]; blocks];
    let block: Vec<&[f16]> = block.iter().map(Vec::as_slice).collect();
    let queries = vec![0.5; rows * 32 * 64];
    let mut out = vec![0.0; rows * 32 * 64];
    shortest(|| {
        attention(
            pool,
            &shape,
            &mut [SequenceAttention {
                queries: &queries,
                first_position,
                keys: &block,
                values: &block,
                out: &mut out,
            }],
        );
    })
}

fn dispatch_seconds(pool: &ThreadPool) -> f64 {
    const JOBS: usize = 2000;
    shortest(|| {
        for _ in 0..JOBS {
            pool.run(16, &|piece| {
                black_box(piece);
            });
        }
    }) / JOBS as f64
}
