//! Floats or 32-bit words side by side: the registers of each instruction set, plain numbers, and arrays of them. Kernels take
//! sixteen, in as many registers as needed; with one row of activations, on x86-64, as many as one register holds. Code that works on them is
//! written once, and computes in the same order everywhere.
//!
//! The implementations for an instruction set may only be used in code that runs where the processor has it:
//! that is part of the safety contract of every function that is generic over these traits.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod sse41;

use half::f16;

use super::numerics::{f16_to_f32, multiply_add};

/// Floats side by side: as many as a register holds, or several registers of them.
pub(super) trait Lanes: Copy {
    const COUNT: usize;
    /// Rows or queries whose sums the registers hold at once, with sixteen floats for each.
    const TILE: usize;

    fn splat(number: f32) -> Self;

    /// # Safety
    /// `COUNT` floats at `from` are readable.
    unsafe fn load(from: *const f32) -> Self;

    /// # Safety
    /// `COUNT` half-precision numbers at `from` are readable.
    unsafe fn load_halves(from: *const f16) -> Self;

    /// # Safety
    /// `COUNT` signed bytes at `from` are readable.
    unsafe fn load_bytes(from: *const i8) -> Self;

    /// # Safety
    /// `COUNT` floats at `to` are writable.
    unsafe fn store(self, to: *mut f32);

    fn add(self, other: Self) -> Self;

    fn multiply(self, other: Self) -> Self;

    /// `self * factor + addend`; fused, except at the levels without such an instruction (plain Rust on x86-64, SSE4.1).
    fn multiply_add(self, factor: Self, addend: Self) -> Self;

    /// The sum of all. The second half is added to the first, and so on until one is left, in registers of every size.
    fn sum(self) -> f32;
}

/// Rows of bytes at equal distances: unlike those of a list, their addresses take few registers.
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(
        dead_code,
        reason = "without vector levels nothing reads several rows at once"
    )
)]
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) first: *const u8,
    /// Bytes from a row to the next; 0 where one row takes the places of several.
    pub(super) stride: usize,
}

impl Rows {
    /// The byte at `offset` of a row.
    ///
    /// # Safety
    /// It is in the row, or just behind it.
    #[inline(always)]
    pub(super) unsafe fn at(&self, row: usize, offset: usize) -> *const u8 {
        // SAFETY: by the contract.
        unsafe { self.first.add(row * self.stride + offset) }
    }

    /// The rows from `row` on.
    ///
    /// # Safety
    /// There is such a row.
    #[inline(always)]
    unsafe fn starting_at(&self, row: usize) -> Self {
        // SAFETY: by the contract.
        let first = unsafe { self.at(row, 0) };
        Self { first, ..*self }
    }

    /// Moves each row on by `bytes`.
    ///
    /// # Safety
    /// As many are left of each.
    #[inline(always)]
    pub(super) unsafe fn advance(&mut self, bytes: usize) {
        // SAFETY: by the contract.
        self.first = unsafe { self.first.add(bytes) };
    }
}

/// One 32-bit word from each of several rows of a matrix, in order: as many rows as one register holds, or several. While blocks
/// unpack, a word never leaves its row's lane.
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(
        dead_code,
        reason = "without vector levels there are no such registers"
    )
)]
pub(super) trait Words: Copy {
    type Floats: Lanes;
    const COUNT: usize;

    /// Prefetches the cache line at `address`, which need not be valid, into the second-level cache (its queue is longer).
    fn prefetch(address: *const u8);

    /// The 4 bytes at `offset` behind each of the first `COUNT` rows.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load_4(rows: &Rows, offset: usize) -> Self;

    /// The 16 bytes at `offset` behind each of the first `COUNT` rows, a word at a time.
    ///
    /// # Safety
    /// They are readable.
    unsafe fn load_16(rows: &Rows, offset: usize) -> [Self; 4];

    /// The 32 bytes at `offset` behind each of the first `COUNT` rows, a word at a time.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn load_32(rows: &Rows, offset: usize) -> [Self; 8] {
        // SAFETY: readable by the contract.
        unsafe {
            let [a, b, c, d] = Self::load_16(rows, offset);
            let [e, f, g, h] = Self::load_16(rows, offset + 16);
            [a, b, c, d, e, f, g, h]
        }
    }

    /// # Safety
    /// `4 * COUNT` bytes at `to` are writable.
    unsafe fn store(self, to: *mut u8);

    /// Replaces each byte, which is below 16, by the table's byte at that index.
    fn look_up(self, table: &[u8; 16]) -> Self;

    fn and(self, mask: u32) -> Self;

    fn or(self, other: Self) -> Self;

    fn xor(self, mask: u32) -> Self;

    fn add(self, number: i32) -> Self;

    fn multiply(self, number: i32) -> Self;

    fn shift_left(self, bits: i32) -> Self;

    fn shift_right(self, bits: i32) -> Self;

    /// Fills in copies of the sign bit.
    fn shift_right_signed(self, bits: i32) -> Self;

    /// The words as signed integers.
    fn to_floats(self) -> Self::Floats;

    /// The words as bits of floats.
    fn as_floats(self) -> Self::Floats;

    /// The lower halves of the words as half-precision numbers.
    fn halves_to_floats(self) -> Self::Floats;
}

/// Calls `method` on each register. A loop, because a closure would not be compiled for its caller's instruction set.
macro_rules! each {
    ($registers:ident.$method:ident($($argument:expr),*)) => {{
        let mut out = $registers;
        for out in &mut out {
            *out = out.$method($($argument),*);
        }
        out
    }};
}

impl<R: Lanes, const N: usize> Lanes for [R; N] {
    const COUNT: usize = R::COUNT * N;
    const TILE: usize = R::TILE;

    #[inline(always)]
    fn splat(number: f32) -> Self {
        [R::splat(number); N]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        let mut out = [R::splat(0.0); N];
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: readable by the contract; so below.
            *out = unsafe { R::load(from.add(i * R::COUNT)) };
        }
        out
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self {
        let mut out = [R::splat(0.0); N];
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: as in `load`.
            *out = unsafe { R::load_halves(from.add(i * R::COUNT)) };
        }
        out
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const i8) -> Self {
        let mut out = [R::splat(0.0); N];
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: as in `load`.
            *out = unsafe { R::load_bytes(from.add(i * R::COUNT)) };
        }
        out
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        for (i, register) in self.into_iter().enumerate() {
            // SAFETY: writable by the contract.
            unsafe { register.store(to.add(i * R::COUNT)) };
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        let mut out = self;
        for i in 0..N {
            out[i] = self[i].add(other[i]);
        }
        out
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        let mut out = self;
        for i in 0..N {
            out[i] = self[i].multiply(other[i]);
        }
        out
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        let mut out = self;
        for i in 0..N {
            out[i] = self[i].multiply_add(factor[i], addend[i]);
        }
        out
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        let mut registers = self;
        let mut half = N / 2;
        while half > 0 {
            for i in 0..half {
                registers[i] = registers[i].add(registers[i + half]);
            }
            half /= 2;
        }
        registers[0].sum()
    }
}

impl<R: Words, const N: usize> Words for [R; N] {
    type Floats = [R::Floats; N];
    const COUNT: usize = R::COUNT * N;

    #[inline(always)]
    fn prefetch(address: *const u8) {
        R::prefetch(address);
    }

    #[inline(always)]
    unsafe fn load_4(rows: &Rows, offset: usize) -> Self {
        // SAFETY: there are `COUNT` rows from each of these on, readable by the contract; so below.
        unsafe {
            let mut out = [R::load_4(rows, offset); N];
            for (i, out) in out.iter_mut().enumerate().skip(1) {
                *out = R::load_4(&rows.starting_at(i * R::COUNT), offset);
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn load_16(rows: &Rows, offset: usize) -> [Self; 4] {
        // SAFETY: as in `load_4`.
        unsafe {
            let [a, b, c, d] = R::load_16(rows, offset);
            let mut out = [[a; N], [b; N], [c; N], [d; N]];
            for i in 1..N {
                let columns = R::load_16(&rows.starting_at(i * R::COUNT), offset);
                for (out, column) in out.iter_mut().zip(columns) {
                    out[i] = column;
                }
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        for (i, register) in self.into_iter().enumerate() {
            // SAFETY: writable by the contract.
            unsafe { register.store(to.add(i * 4 * R::COUNT)) };
        }
    }

    #[inline(always)]
    fn look_up(self, table: &[u8; 16]) -> Self {
        each!(self.look_up(table))
    }

    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        each!(self.and(mask))
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        let mut out = self;
        for i in 0..N {
            out[i] = self[i].or(other[i]);
        }
        out
    }

    #[inline(always)]
    fn xor(self, mask: u32) -> Self {
        each!(self.xor(mask))
    }

    #[inline(always)]
    fn add(self, number: i32) -> Self {
        each!(self.add(number))
    }

    #[inline(always)]
    fn multiply(self, number: i32) -> Self {
        each!(self.multiply(number))
    }

    #[inline(always)]
    fn shift_left(self, bits: i32) -> Self {
        each!(self.shift_left(bits))
    }

    #[inline(always)]
    fn shift_right(self, bits: i32) -> Self {
        each!(self.shift_right(bits))
    }

    #[inline(always)]
    fn shift_right_signed(self, bits: i32) -> Self {
        each!(self.shift_right_signed(bits))
    }

    #[inline(always)]
    fn to_floats(self) -> Self::Floats {
        let mut out = [self[0].to_floats(); N];
        for i in 1..N {
            out[i] = self[i].to_floats();
        }
        out
    }

    #[inline(always)]
    fn as_floats(self) -> Self::Floats {
        let mut out = [self[0].as_floats(); N];
        for i in 1..N {
            out[i] = self[i].as_floats();
        }
        out
    }

    #[inline(always)]
    fn halves_to_floats(self) -> Self::Floats {
        let mut out = [self[0].halves_to_floats(); N];
        for i in 1..N {
            out[i] = self[i].halves_to_floats();
        }
        out
    }
}

/// Plain Rust.
impl Lanes for f32 {
    const COUNT: usize = 1;
    const TILE: usize = 1;

    #[inline(always)]
    fn splat(number: f32) -> Self {
        number
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: readable by the contract.
        unsafe { from.read() }
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const f16) -> Self {
        // SAFETY: readable by the contract.
        f16_to_f32(unsafe { from.read() }.to_bits())
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const i8) -> Self {
        // SAFETY: readable by the contract.
        f32::from(unsafe { from.read() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: writable by the contract.
        unsafe { to.write(self) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self + other
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        self * other
    }

    #[inline(always)]
    fn multiply_add(self, factor: Self, addend: Self) -> Self {
        multiply_add(self, factor, addend)
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        self
    }
}
