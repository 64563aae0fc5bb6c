//! How fast this machine's processor multiplies weights, by the engine's own kernels, and how long a layer takes
//! besides.
//!
//! Decides the sizes: matrices of a medium-sized model, so many that none is still in a cache at its next turn. Refuses
//! to estimate a format from another.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use prima_crds::v1alpha1::node_profile::Throughput;
use prima_engine::kernels::{
    self, AttentionShape, KvBlock, KvShape, Matrix, MatrixError, Rope, RopePairing,
    SequenceAttention, ThreadPool,
};
use prima_gguf::GgmlType;

use super::samples::RunTimes;

/// Bytes that are valid as blocks of any format, more than the caches hold.
pub struct SampleWeights(Vec<u8>);

/// The formats that the engine runs.
pub fn formats() -> impl Iterator<Item = GgmlType> {
    let all = GgmlType::ALL.iter().copied();
    all.filter(|format| kernels::supported(*format))
}

/// Size of all processors' last-level caches together, in bytes, from the files below `root` (`/`, except in tests).
pub fn cache_bytes(root: &Path) -> usize {
    let mut last_level = 0;
    let mut caches = HashMap::new();
    let folder = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    for cpu in folder(&root.join("sys/devices/system/cpu")) {
        for cache in folder(&cpu.path().join("cache")) {
            let text = |file: &str| fs::read_to_string(cache.path().join(file)).ok();
            let cache = || {
                let level: u32 = text("level")?.trim().parse().ok()?;
                let kilobytes = text("size")?
                    .trim()
                    .strip_suffix('K')?
                    .parse::<usize>()
                    .ok()?;
                // The same cache is listed for each processor that shares it.
                Some((level, text("shared_cpu_list")?, kilobytes))
            };
            if let Some((level, shared, kilobytes)) = cache() {
                last_level = last_level.max(level);
                caches.insert((level, shared), kilobytes << 10);
            }
        }
    }
    let last = caches.iter().filter(|((level, _), _)| *level == last_level);
    last.map(|(_, bytes)| *bytes).sum()
}

impl SampleWeights {
    /// Four times `cache_bytes`, between 128 MiB and 512 MiB, and not more than a quarter of `available_bytes` of memory (but at least 64
    /// MiB: one matrix of F32).
    pub fn new(cache_bytes: usize, available_bytes: u64) -> SampleWeights {
        let quarter = usize::try_from(available_bytes / 4).unwrap_or(usize::MAX);
        let len = (4 * cache_bytes)
            .clamp(128 << 20, 512 << 20)
            .min(quarter)
            .max(ONE_F32_MATRIX)
            .next_multiple_of(8);
        SampleWeights::of(len)
    }

    /// `len` bytes: a multiple of 8, and 1 MiB at least.
    pub(super) fn of(len: usize) -> SampleWeights {
        // Bytes 0x2c to 0x3b: whatever the format, its numbers are normal, and neither huge nor tiny (F16 0.07 to 0.9). Slow
        // subnormals are rare in real weights.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < ONE_F32_MATRIX / 64 {
            // Xorshift (Marsaglia 2003).
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let low = state & 0x0f0f_0f0f_0f0f_0f0f;
            bytes.extend_from_slice(&(low + 0x2c2c_2c2c_2c2c_2c2c).to_le_bytes());
        }
        // The same again and again: a cache tells by the address, not by what is there.
        while bytes.len() < len {
            bytes.extend_from_within(..bytes.len().min(len - bytes.len()));
        }
        SampleWeights(bytes)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// As many matrices of so many `rows` as there are bytes for.
    ///
    /// # Errors
    /// None for a format of [`formats`].
    pub fn matrices(&self, format: GgmlType, rows: usize) -> Result<Vec<Matrix<'_>>, MatrixError> {
        Ok(Turns::new(self, format, rows)?.matrices)
    }
}

/// Multiplies weights of one format with one position, and with many.
///
/// # Errors
/// None for a format of [`formats`].
pub fn throughput(
    pool: &ThreadPool,
    weights: &SampleWeights,
    format: GgmlType,
) -> Result<Throughput, MatrixError> {
    let decode = Turns::new(weights, format, DECODE_ROWS)?;
    let prefill = Turns::new(weights, format, PREFILL_ROWS)?;
    let (decode_bytes, decode) = decode.time(pool, 1, DECODE_SAMPLE);
    let (prefill_bytes, prefill) = prefill.time(pool, POSITIONS, 1);
    let weights = prefill_bytes / format.block_bytes() * format.block_len();
    let flop = 2.0 * (weights * POSITIONS) as f64;
    Ok(rates(format, (decode_bytes, &decode), (flop, &prefill)))
}

/// Multiplies one position with a matrix of Q4_K, the format that people use most; each time with the next matrix.
///
/// # Errors
/// None: the engine runs the format.
pub fn some_work<'a>(
    pool: &'a ThreadPool,
    weights: &'a SampleWeights,
) -> Result<impl Fn() + Sync + 'a, MatrixError> {
    let turns = Turns::new(weights, GgmlType::Q4K, DECODE_ROWS)?;
    let x = vec![0.5; COLUMNS];
    let turn = AtomicUsize::new(0);
    Ok(move || {
        let matrix = turns.matrices[turn.fetch_add(1, Ordering::Relaxed) % turns.matrices.len()];
        let mut out = vec![0.0; turns.rows];
        kernels::matmul(pool, &x, 1, &mut [(matrix, &mut out)]);
    })
}

/// The rates of `format`: `bytes` are read in each sample of one position, `flop` operations are done in each sample of
/// many positions.
pub fn rates(
    format: GgmlType,
    (bytes, decode): (usize, &RunTimes),
    (flop, prefill): (f64, &RunTimes),
) -> Throughput {
    let spread = decode.spread_percent().max(prefill.spread_percent());
    Throughput {
        format: format.name().to_owned(),
        decode_bytes_per_second: (bytes as f64 / decode.median()) as i64,
        prefill_flop_per_second: (flop / prefill.median()) as i64,
        spread_percent: Some(spread.round() as i32),
    }
}

/// Seconds that a layer of the shape of TinyLlama 1.1B (hidden 2048, 32 heads on 4 KV heads of 64, feed-forward 5632) takes for one
/// position besides reading its weights and its KV cache. Runs the same steps in the same order over one cached position, with matrices of
/// so few rows that they cost almost nothing. Most of the time is spent handing out work to threads and does not depend on the shape; the
/// rest is linear in the layer's width.
///
/// # Errors
/// None: the shapes are valid.
pub fn layer_overhead_seconds(
    pool: &ThreadPool,
    weights: &SampleWeights,
) -> Result<f64, MatrixError> {
    const HIDDEN: usize = 2048;
    const FEED_FORWARD: usize = 5632;
    const SHAPE: AttentionShape<'_> = AttentionShape {
        heads: 32,
        kv: KvShape {
            kv_heads: 4,
            head_dim: 64,
            values_in_keys: None,
        },
        scale: 0.125,
        window: None,
        softcap: None,
        sinks: None,
    };
    const LAYERS: usize = 32;
    let kv_row = SHAPE.kv.row_len();
    let frequencies = vec![1e-3; SHAPE.kv.head_dim / 2];
    let angles = Rope::new(RopePairing::Interleaved, frequencies, 1.0).angles([100]);
    let norm = vec![1.0; HIDDEN];
    let mut activation = vec![0.5; HIDDEN];
    let mut normed = vec![0.0; HIDDEN];
    let mut projected = vec![0.5; HIDDEN];
    let (mut queries, mut attended) = (vec![0.5; HIDDEN], vec![0.5; HIDDEN]);
    let mut keys = vec![0.5; kv_row];
    let (mut gate, up) = (vec![0.5; FEED_FORWARD], vec![0.5; FEED_FORWARD]);
    let block = KvBlock::f16(SHAPE.kv);
    // Just enough rows to give every thread a piece.
    let rows = 16 * pool.threads();
    let narrow = Turns::new(weights, GgmlType::Q4_0, rows)?.matrix(0, HIDDEN)?;
    let narrow_down = Turns::new(weights, GgmlType::Q4_0, rows)?.matrix(0, FEED_FORWARD)?;
    let mut out = vec![0.0; 3 * rows];
    let samples = RunTimes::take(|| {
        for _ in 0..LAYERS {
            kernels::rms_norm(pool, &activation, &norm, 1e-5, &mut normed);
            let mut three = out.chunks_exact_mut(rows).map(|out| (narrow, out));
            if let (Some(q), Some(k), Some(v)) = (three.next(), three.next(), three.next()) {
                kernels::matmul(pool, &normed, 1, &mut [q, k, v]);
            }
            kernels::rotate(pool, &angles, &mut queries, SHAPE.heads, SHAPE.kv.head_dim);
            kernels::rotate(
                pool,
                &angles,
                &mut keys,
                SHAPE.kv.kv_heads,
                SHAPE.kv.head_dim,
            );
            let sequence = SequenceAttention {
                queries: &queries,
                first_position: 0,
                first_block: 0,
                blocks: &[&block],
                out: &mut attended,
            };
            kernels::attention(pool, &SHAPE, &mut [sequence]);
            kernels::matmul(pool, &attended, 1, &mut [(narrow, &mut out[..rows])]);
            kernels::add(pool, &mut activation, &projected);

            kernels::rms_norm(pool, &activation, &norm, 1e-5, &mut normed);
            let mut two = out.chunks_exact_mut(rows).map(|out| (narrow, out));
            if let (Some(gate), Some(up)) = (two.next(), two.next()) {
                kernels::matmul(pool, &normed, 1, &mut [gate, up]);
            }
            kernels::swiglu(pool, &mut gate, &up);
            kernels::matmul(pool, &gate, 1, &mut [(narrow_down, &mut out[..rows])]);
            kernels::add(pool, &mut activation, &projected);
            // Resets the numbers, so that they do not overflow; otherwise the time does not depend on them.
            activation.fill(0.5);
            gate.fill(0.5);
            projected.fill(0.5);
        }
    });
    Ok(samples.median() / LAYERS as f64)
}

/// Columns of every matrix, and rows of a feed-forward matrix: a model of 1B.
pub const COLUMNS: usize = 2048;
pub const DECODE_ROWS: usize = 8192;
const ONE_F32_MATRIX: usize = COLUMNS * DECODE_ROWS * 4;
/// Smaller, for processors that would take a second otherwise.
const PREFILL_ROWS: usize = 2048;
/// Positions of a prefill that are multiplied at once: half a frame of the ring.
pub const POSITIONS: usize = 64;
/// The fewest bytes between two looks at the clock.
const DECODE_SAMPLE: usize = 24 << 20;

/// Matrices of one shape and format, cut from the weights and used in turn.
struct Turns<'a> {
    bytes: &'a [u8],
    format: GgmlType,
    rows: usize,
    matrices: Vec<Matrix<'a>>,
}

impl<'a> Turns<'a> {
    fn new(weights: &'a SampleWeights, format: GgmlType, rows: usize) -> Result<Self, MatrixError> {
        let mut turns = Turns {
            bytes: weights.bytes(),
            format,
            rows,
            matrices: Vec::new(),
        };
        let count = turns.bytes.len() / turns.matrix_bytes(COLUMNS);
        turns.matrices = (0..count)
            .map(|index| turns.matrix(index, COLUMNS))
            .collect::<Result<_, _>>()?;
        Ok(turns)
    }

    fn matrix(&self, index: usize, columns: usize) -> Result<Matrix<'a>, MatrixError> {
        let len = self.matrix_bytes(columns);
        Matrix::new(
            self.format,
            self.rows,
            columns,
            &self.bytes[index * len..][..len],
        )
    }

    fn matrix_bytes(&self, columns: usize) -> usize {
        self.rows * columns / self.format.block_len() * self.format.block_bytes()
    }

    /// Multiplies matrices of `sample_bytes` together (at least one matrix) with `n` positions, again and again. Returns the bytes of
    /// weights in a sample, and the samples.
    fn time(&self, pool: &ThreadPool, n: usize, sample_bytes: usize) -> (usize, RunTimes) {
        let each = self.matrix_bytes(COLUMNS);
        let count = sample_bytes.div_ceil(each);
        let x: Vec<f32> = (0..n * COLUMNS).map(|i| (i as f32).sin()).collect();
        let mut out = vec![0.0; n * self.rows];
        let mut turns = self.matrices.iter().cycle();
        let samples = RunTimes::take(|| {
            for matrix in turns.by_ref().take(count) {
                kernels::matmul(pool, &x, n, &mut [(*matrix, &mut out)]);
            }
        });
        (count * each, samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prima_engine::kernels::{IsaLevel, dequantize_row};

    #[test]
    fn caches_that_processors_share_count_once() {
        let root = tempfile::tempdir().unwrap();
        let cache = |cpu: u32, index: u32, level: &str, size: &str, shared: &str| {
            let folder = root.path().join(format!(
                "sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            ));
            fs::create_dir_all(&folder).unwrap();
            for (file, text) in [
                ("level", level),
                ("size", size),
                ("shared_cpu_list", shared),
            ] {
                fs::write(folder.join(file), text).unwrap();
            }
        };
        for cpu in 0..4 {
            cache(cpu, 0, "1\n", "32K\n", &format!("{cpu}\n"));
            let shared = if cpu < 2 { "0-1\n" } else { "2-3\n" };
            cache(cpu, 3, "3\n", "32768K\n", shared);
        }
        assert_eq!(cache_bytes(root.path()), 64 << 20);
        assert_eq!(cache_bytes(&root.path().join("nothing")), 0);
    }

    #[test]
    fn measured_weights_exceed_caches_and_leave_most_memory() {
        for (caches, available, expected) in [
            (0, u64::MAX, 128 << 20),
            (48 << 20, u64::MAX, 192 << 20),
            (1 << 30, u64::MAX, 512 << 20),
            (1 << 30, 1 << 30, 256 << 20),
            (0, 0, 64 << 20),
        ] {
            assert_eq!(
                SampleWeights::new(caches, available).bytes().len(),
                expected
            );
        }
    }

    #[test]
    fn the_bytes_are_ordinary_numbers_in_every_format() {
        let weights = SampleWeights::new(0, 0);
        let mut formats_seen = 0;
        for format in formats() {
            let matrix = Turns::new(&weights, format, 16).unwrap().matrices[0];
            let mut row = vec![0.0; COLUMNS];
            dequantize_row(matrix, 3, &mut row);
            let sane = |x: &f32| *x == 0.0 || (x.is_normal() && x.abs() < 1e5);
            assert!(row.iter().all(sane), "{format}: {row:?}");
            assert!(row.iter().any(|x| *x != row[0]), "{format} is constant");
            formats_seen += 1;
        }
        assert_eq!(formats_seen, 23);
    }

    #[test]
    fn every_rate_is_positive() {
        let weights = SampleWeights::new(0, 0);
        let pool = ThreadPool::new(2, IsaLevel::detect()).unwrap();
        let measured = throughput(&pool, &weights, GgmlType::Q4K).unwrap();
        assert!(
            measured.decode_bytes_per_second > 0 && measured.prefill_flop_per_second > 0,
            "{measured:?}"
        );
        assert!(layer_overhead_seconds(&pool, &weights).unwrap() > 0.0);
    }
}
