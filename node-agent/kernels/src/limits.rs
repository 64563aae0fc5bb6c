//! The most that this machine's processors can do, for benchmarks to compare the kernels with: reading memory, and multiplying bytes
//! that are already in registers. Knows nothing of weights or formats.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::isa_level::Kind;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::lanes::Words;
use super::per_level;
use super::thread_pool::ThreadPool;

/// The fastest of several passes over `memory`, by all threads of the pool, in bytes per second. `memory` should be several times as
/// large as the caches.
pub fn read_bytes_per_second(pool: &ThreadPool, memory: &[u64]) -> f64 {
    const PIECE: usize = 1 << 17;
    let pieces = memory.len() / PIECE;
    let passes = (0..5).map(|_| {
        let start = Instant::now();
        pool.run(pieces, &|piece| {
            let mut sum = 0;
            let words = &memory[piece * PIECE..][..PIECE];
            sum_words(pool.level(), words, &mut sum);
            black_box(sum);
        });
        start.elapsed()
    });
    let fastest = passes.min().unwrap_or(Duration::MAX);
    (pieces * PIECE * size_of::<u64>()) as f64 / fastest.as_secs_f64()
}

per_level! {
    fn sum_words(level, words: &[u64], sum: &mut u64) {
        // Enough to hide the memory's latency; into the second-level cache, as the kernels prefetch weights.
        const AHEAD: usize = 8 << 10;
        let mut lanes = [0_u64; 32];
        for words in words.as_chunks::<32>().0 {
            for line in 0..4 {
                prefetch(words.as_ptr().cast::<u8>().wrapping_add(AHEAD + 64 * line));
            }
            for lane in 0..32 {
                lanes[lane] = lanes[lane].wrapping_add(words[lane]);
            }
        }
        *sum = lanes.iter().fold(0, |sum, lane| sum.wrapping_add(*lane));
    }
}

#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    <std::arch::x86_64::__m128i as Words>::prefetch(address);
    #[cfg(target_arch = "aarch64")]
    <std::arch::aarch64::uint32x4_t as Words>::prefetch(address);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

/// The most byte products, each with its addition (two operations), that the pool's threads together do per second at its level,
/// with operands in registers. 0 at the scalar level, where the compiler chooses the instructions.
pub fn byte_operations_per_second(pool: &ThreadPool) -> f64 {
    const STEPS: usize = 1 << 20;
    // More pieces than threads, large enough that handing them out costs nothing.
    let pieces = 4 * pool.threads();
    let per_step = multiply_in_registers(pool.level().kind(), 0);
    let runs = (0..5).map(|_| {
        let start = Instant::now();
        pool.run(pieces, &|_| {
            multiply_in_registers(pool.level().kind(), STEPS);
        });
        start.elapsed()
    });
    let fastest = runs.min().unwrap_or(Duration::MAX);
    (pieces * STEPS * per_step) as f64 / fastest.as_secs_f64()
}

/// Runs `steps` steps, each with enough independent sums to hide an instruction's latency; returns the operations of a step.
fn multiply_in_registers(kind: Kind, steps: usize) -> usize {
    match kind {
        Kind::Scalar => 0,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `IsaLevel` of this kind exists only on processors that have its instructions; so below.
        Kind::Sse41 => unsafe { x86::sse41(steps) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx2 => unsafe { x86::avx2(steps) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::AvxVnni => unsafe { x86::avx_vnni(steps) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx512Vnni => unsafe { x86::avx512(steps) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Kind::Neon => unsafe { arm64::neon(steps) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Kind::NeonDotprod => unsafe { arm64::dotprod(steps) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Kind::NeonI8mm => unsafe { arm64::i8mm(steps) },
    }
}

/// Independent sums: more than an instruction's latency times how many of it start in a cycle.
const SUMS: usize = 12;

/// Defines a function that runs `$step` on `SUMS` registers `steps` times, and returns the operations of a step.
macro_rules! in_registers {
    ($name:ident, $features:literal, $operations:expr, $zero:expr, |$sum:ident, $x:ident| $step:expr) => {
        /// # Safety
        /// The processor has the features.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $name(steps: usize) -> usize {
            let $x = black_box($zero);
            let mut sums = black_box([$zero; SUMS]);
            for _ in 0..steps {
                for sum in &mut sums {
                    let $sum = *sum;
                    *sum = $step;
                }
            }
            black_box(sums);
            SUMS * $operations
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::SUMS;

    // Where the multiplication does not add, the sum is one operand: with two constant operands the compiler would multiply only
    // once.
    in_registers!(sse41, "sse4.1,ssse3", 32, _mm_setzero_si128(), |sum, x| {
        _mm_add_epi16(sum, _mm_maddubs_epi16(sum, x))
    });
    in_registers!(
        avx2,
        "avx2,fma,f16c",
        64,
        _mm256_setzero_si256(),
        |sum, x| _mm256_add_epi16(sum, _mm256_maddubs_epi16(sum, x))
    );
    in_registers!(
        avx_vnni,
        "avx2,fma,f16c,avxvnni",
        64,
        _mm256_setzero_si256(),
        |sum, x| _mm256_dpbusd_avx_epi32(sum, x, x)
    );
    in_registers!(
        avx512,
        "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c",
        128,
        _mm512_setzero_si512(),
        |sum, x| _mm512_dpbusd_epi32(sum, x, x)
    );
}

#[cfg(target_arch = "aarch64")]
mod arm64 {
    use std::arch::aarch64::*;
    use std::arch::asm;
    use std::hint::black_box;

    use super::super::neon::{sdot, usmmla};
    use super::SUMS;

    // SAFETY: registers only. (With Rust's own function, the compiler would move the product out of the loop.)
    in_registers!(neon, "neon", 16, vdupq_n_s16(0), |sum, x| unsafe {
        let mut sum: int16x8_t = sum;
        asm!(
            "smlal {sum:v}.8h, {x:v}.8b, {x:v}.8b",
            sum = inout(vreg) sum, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
        sum
    });
    // SAFETY: the features are the function's own; so below.
    in_registers!(
        dotprod,
        "neon,dotprod",
        4 * 32,
        vdupq_n_s32(0),
        |sum, x| unsafe { sdot(sum, [vreinterpretq_s8_s32(x); 4], vreinterpretq_s8_s32(x)) }
    );
    // SAFETY: as above.
    in_registers!(
        i8mm,
        "neon,dotprod,i8mm",
        64,
        vdupq_n_s32(0),
        |sum, x| unsafe { usmmla(sum, vreinterpretq_u32_s32(x), vreinterpretq_s64_s32(x)) }
    );
}
