//! The matrix kernels, format by level: decode in bytes of weights read per second, beside the memory's own speed, and prefill in
//! operations per second, beside what the processor does in registers.

use std::hint::black_box;
use std::time::{Duration, Instant};

use prima_engine::kernels::{
    AttentionShape, BLOCK_POSITIONS, IsaLevel, KvBlock, KvShape, Matrix, SequenceAttention,
    ThreadPool, attention, limits, matmul, supported,
};
use prima_gguf::GgmlType;

use crate::Effort;
use crate::error::BenchError;
use prima_tests::statistics::Samples;

/// Columns and rows of a feed-forward matrix of a 1B model.
pub const COLS: usize = 2048;
pub const ROWS: usize = 8192;
/// Rows of activations in a prefill.
const PREFILL: usize = 128;
/// Bytes that are read before the same are read again: more than caches hold.
const MEMORY: usize = 1 << 30;
/// If a run is shorter, a sample is of several runs.
const SAMPLE: Duration = Duration::from_millis(50);

/// All levels of this processor, lowest first.
pub struct KernelSpeeds {
    pub threads: usize,
    pub levels: Vec<String>,
    /// The limits and each format, of every level.
    pub formats: Vec<(String, Vec<Cell>)>,
    /// Seconds.
    pub attention_decode: Vec<Samples>,
    pub attention_prefill: Vec<Samples>,
    pub dispatch: Vec<Samples>,
}

/// One format at one level.
#[derive(Default)]
pub struct Cell {
    /// Bytes of weights read per second at one row of activations.
    pub decode: Samples,
    /// Operations per second at many rows.
    pub prefill: Samples,
}

/// With as many threads as there are cores. Levels take turns.
pub fn measure(effort: &Effort) -> Result<KernelSpeeds, BenchError> {
    let threads = prima_engine::Compute::available_threads();
    let levels = IsaLevel::available().into_iter();
    let pools: Vec<ThreadPool> = levels
        .map(|level| ThreadPool::new(threads, level))
        .collect::<Result<_, _>>()?;
    let each = |measure: &dyn Fn(&ThreadPool) -> f64| -> Vec<Samples> {
        let mut all = vec![Samples::default(); pools.len()];
        for turn in 0..effort.turns {
            let mut turns: Vec<_> = pools.iter().zip(&mut all).collect();
            // Who begins alternates.
            if turn % 2 == 1 {
                turns.reverse();
            }
            for (pool, samples) in turns {
                samples.push(measure(pool));
            }
        }
        all
    };
    let cells = |decode: Vec<Samples>, prefill: Vec<Samples>| -> Vec<Cell> {
        let both = decode.into_iter().zip(prefill);
        both.map(|(decode, prefill)| Cell { decode, prefill })
            .collect()
    };
    let memory = vec![1_u64; MEMORY / 8];
    let read = each(&|pool| limits::read_bytes_per_second(pool, &memory));
    drop(memory);
    let multiplied = each(&limits::byte_operations_per_second);
    let mut formats = vec![("limit".to_owned(), cells(read, multiplied))];
    for &format in GgmlType::ALL.iter().filter(|format| supported(**format)) {
        eprintln!("kernels: {format}");
        let weights = weights(format);
        let decode = each(&|pool| {
            let all = weights.len() / matrix_bytes(format);
            let seconds = seconds(|| product(pool, format, &weights, 0..all, 1));
            weights.len() as f64 / seconds
        });
        let prefill = each(&|pool| {
            let seconds = seconds(|| product(pool, format, &weights, 0..1, PREFILL));
            2.0 * (ROWS * COLS * PREFILL) as f64 / seconds
        });
        formats.push((format.to_string(), cells(decode, prefill)));
    }
    Ok(KernelSpeeds {
        threads,
        levels: pools
            .iter()
            .map(|pool| pool.level().name().to_owned())
            .collect(),
        formats,
        attention_decode: each(&|pool| attention_seconds(pool, 4095, 1)),
        attention_prefill: each(&|pool| attention_seconds(pool, 0, 512)),
        dispatch: each(&dispatch_seconds),
    })
}

/// Seconds of one run: the mean of as many as make a sample, after one that is not counted.
fn seconds(mut work: impl FnMut()) -> f64 {
    work();
    let begun = Instant::now();
    let mut runs = 0;
    while runs == 0 || begun.elapsed() < SAMPLE {
        work();
        runs += 1;
    }
    begun.elapsed().as_secs_f64() / f64::from(runs)
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

/// Bytes of one matrix.
fn matrix_bytes(format: GgmlType) -> usize {
    ROWS * COLS / format.block_len() * format.block_bytes()
}

/// Matrices of [`MEMORY`] bytes together.
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

/// `n` rows of activations times each of these matrices.
fn product(
    pool: &ThreadPool,
    format: GgmlType,
    weights: &[u8],
    matrices: std::ops::Range<usize>,
    n: usize,
) {
    let x: Vec<f32> = (0..n * COLS).map(|i| (i as f32).sin()).collect();
    let mut out = vec![0.0; n * ROWS];
    for bytes in weights
        .chunks_exact(matrix_bytes(format))
        .skip(matrices.start)
        .take(matrices.len())
    {
        if let Ok(matrix) = Matrix::new(format, ROWS, COLS, bytes) {
            matmul(pool, &x, n, &mut [(matrix, &mut out)]);
        }
    }
}

fn attention_seconds(pool: &ThreadPool, first_position: usize, rows: usize) -> f64 {
    let kv = KvShape {
        kv_heads: 8,
        head_dim: 64,
        values_in_keys: None,
    };
    let shape = AttentionShape {
        heads: 32,
        kv,
        scale: 0.125,
        window: None,
        softcap: None,
        sinks: None,
    };
    let blocks = (first_position + rows).div_ceil(BLOCK_POSITIONS);
    let blocks = vec![KvBlock::f16(kv); blocks];
    let blocks: Vec<&KvBlock> = blocks.iter().collect();
    let queries = vec![0.5; rows * 32 * 64];
    let mut out = vec![0.0; rows * 32 * 64];
    seconds(|| {
        attention(
            pool,
            &shape,
            &mut [SequenceAttention {
                queries: &queries,
                first_position,
                first_block: 0,
                blocks: &blocks,
                out: &mut out,
            }],
        );
    })
}

fn dispatch_seconds(pool: &ThreadPool) -> f64 {
    seconds(|| {
        pool.run(16, &|piece| {
            black_box(piece);
        });
    })
}
