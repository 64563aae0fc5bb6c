//! Registers of 128 bits on arm64, where every processor has them (NEON, with fused products and half precision).

use std::arch::aarch64::*;
use std::arch::asm;

use half::f16;

use super::{Lanes, Rows, Words};

impl Lanes for float32x4_t {
    const COUNT: usize = 4;
    const TILE: usize = 4;

    #[inline(always)]
    fn splat(number: f32) -> Self {
        // SAFETY: every processor of this architecture has NEON; so everywhere below.
        unsafe { vdupq_n_f32(number) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the contract.
        unsafe { vld1q_f32(from) }
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self {
        // SAFETY: readable by the contract.
        widen(unsafe { vld1_u16(from.cast()) })
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const i8) -> Self {
        // SAFETY: readable by the contract (as bytes: they need no alignment).
        unsafe {
            let bytes = vcreate_s8(from.cast::<u32>().read_unaligned().into());
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the contract.
        unsafe { vst1q_f32(to, self) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { vaddq_f32(self, other) }
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { vmulq_f32(self, other) }
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { vfmaq_f32(addend, self, factor) }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: as in `splat`.
        unsafe {
            let pair = vadd_f32(vget_low_f32(self), vget_high_f32(self));
            vget_lane_f32::<0>(pair) + vget_lane_f32::<1>(pair)
        }
    }
}

impl Words for uint32x4_t {
    type Floats = float32x4_t;
    const COUNT: usize = 4;

    #[inline(always)]
    fn prefetch(address: *const u8) {
        // SAFETY: a prefetch of any address is allowed. (There is no stable function for it.)
        unsafe {
            asm!("prfm pldl2keep, [{}]", in(reg) address, options(nomem, nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn load_4(rows: &Rows, offset: usize) -> Self {
        let mut words = [0_u32; 4];
        for (lane, word) in words.iter_mut().enumerate() {
            // SAFETY: readable by the contract.
            *word = unsafe { rows.at(lane, offset).cast::<u32>().read_unaligned() };
        }
        // SAFETY: four words.
        unsafe { vld1q_u32(words.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn load_16(rows: &Rows, offset: usize) -> [Self; 4] {
        // SAFETY: readable by the contract (as bytes: they need no alignment).
        unsafe {
            let a = vreinterpretq_u32_u8(vld1q_u8(rows.at(0, offset)));
            let b = vreinterpretq_u32_u8(vld1q_u8(rows.at(1, offset)));
            let c = vreinterpretq_u32_u8(vld1q_u8(rows.at(2, offset)));
            let d = vreinterpretq_u32_u8(vld1q_u8(rows.at(3, offset)));
            // Four rows of four words become four columns: pairs of rows, then pairs of these.
            let (ab, cd) = (even(a, b), even(c, d));
            let (ab_odd, cd_odd) = (odd(a, b), odd(c, d));
            [
                vreinterpretq_u32_u64(vtrn1q_u64(ab, cd)),
                vreinterpretq_u32_u64(vtrn1q_u64(ab_odd, cd_odd)),
                vreinterpretq_u32_u64(vtrn2q_u64(ab, cd)),
                vreinterpretq_u32_u64(vtrn2q_u64(ab_odd, cd_odd)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: writable by the contract.
        unsafe { vst1q_u8(to, vreinterpretq_u8_u32(self)) }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16]) -> Self {
        // SAFETY: the table has the 16 bytes that are read.
        unsafe {
            let table = vld1q_u8(table.as_ptr());
            vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(self)))
        }
    }

    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { vandq_u32(self, vdupq_n_u32(mask)) }
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { vorrq_u32(self, other) }
    }

    #[inline(always)]
    fn xor(self, mask: u32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { veorq_u32(self, vdupq_n_u32(mask)) }
    }

    #[inline(always)]
    fn add(self, number: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { vaddq_u32(self, vdupq_n_u32(number.cast_unsigned())) }
    }

    #[inline(always)]
    fn multiply(self, number: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { vmulq_u32(self, vdupq_n_u32(number.cast_unsigned())) }
    }

    #[inline(always)]
    fn shift_left(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { vshlq_u32(self, vdupq_n_s32(bits)) }
    }

    #[inline(always)]
    fn shift_right(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe { vshlq_u32(self, vdupq_n_s32(-bits)) }
    }

    #[inline(always)]
    fn shift_right_signed(self, bits: i32) -> Self {
        // SAFETY: as in `splat`.
        unsafe {
            let shifted = vshlq_s32(vreinterpretq_s32_u32(self), vdupq_n_s32(-bits));
            vreinterpretq_u32_s32(shifted)
        }
    }

    #[inline(always)]
    fn to_floats(self) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vcvtq_f32_s32(vreinterpretq_s32_u32(self)) }
    }

    #[inline(always)]
    fn as_floats(self) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vreinterpretq_f32_u32(self) }
    }

    #[inline(always)]
    fn halves_to_floats(self) -> float32x4_t {
        // SAFETY: as in `splat`.
        widen(unsafe { vmovn_u32(self) })
    }
}

/// Half-precision numbers as floats. (Rust's own function takes a type that is not stable.)
#[inline(always)]
fn widen(halves: uint16x4_t) -> float32x4_t {
    let floats;
    // SAFETY: an instruction that every processor of this architecture has; registers only.
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) floats, in(vreg) halves, options(pure, nomem, nostack));
    }
    floats
}

/// Words 0 and 2 of both, in turn.
#[inline(always)]
fn even(a: uint32x4_t, b: uint32x4_t) -> uint64x2_t {
    // SAFETY: as in `splat`.
    unsafe { vreinterpretq_u64_u32(vtrn1q_u32(a, b)) }
}

/// Words 1 and 3 of both, in turn.
#[inline(always)]
fn odd(a: uint32x4_t, b: uint32x4_t) -> uint64x2_t {
    // SAFETY: as in `splat`.
    unsafe { vreinterpretq_u64_u32(vtrn2q_u32(a, b)) }
}
