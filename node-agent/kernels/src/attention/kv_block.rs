//! Keys and values of a block of positions. Decides how they lie in memory, and how numbers are rounded when they are stored.
//!
//! In Q8_0, 32 numbers of one head at one position share a scale. No scale belongs to several positions: what is stored at a position
//! so depends neither on its neighbours nor on when they come.

use std::ops::Range;

use half::f16;

use super::super::activations::largest_magnitude;
use super::super::numerics::ROUNDER;
use super::head_block::{F16Head, LatentF16Head, LatentQ8_0Head, Q8_0Head, SCALE_DIMS};
use super::{BLOCK_POSITIONS, KEY_LANES, KvShape};

/// The keys and values of [`BLOCK_POSITIONS`] positions in one layer.
///
/// KV heads follow one another. Within a head, keys lie as `[4][head_dim][16 positions]`, so that 16 scores are computed side by side;
/// values lie as `[64 positions][head_dim]`, and so do keys that are values, too. The scales of a head's keys, and of its values, lie as
/// `[head_dim / 32][64 positions]`.
#[derive(Clone)]
pub struct KvBlock {
    shape: KvShape,
    numbers: Numbers,
}

/// No values: they are the first numbers of the keys.
#[derive(Clone)]
enum Numbers {
    F16 {
        keys: Box<[f16]>,
        values: Option<Box<[f16]>>,
    },
    Q8_0 {
        keys: ScaledBytes,
        values: Option<ScaledBytes>,
    },
}

#[derive(Clone)]
struct ScaledBytes {
    bytes: Box<[i8]>,
    scales: Box<[f16]>,
}

/// One head's part of a block.
pub(super) enum Head<'a> {
    F16(F16Head<'a>),
    Q8_0(Q8_0Head<'a>),
    LatentF16(LatentF16Head<'a>),
    LatentQ8_0(LatentQ8_0Head<'a>),
}

impl KvBlock {
    /// A block of zeros as F16. Numbers beyond its range become its largest number.
    pub fn f16(shape: KvShape) -> Self {
        let zeros = || vec![f16::ZERO; BLOCK_POSITIONS * shape.row_len()].into_boxed_slice();
        let (keys, values) = (zeros(), shape.values_in_keys.is_none().then(zeros));
        let numbers = Numbers::F16 { keys, values };
        Self { shape, numbers }
    }

    /// A block of zeros as Q8_0: bytes, and an F16 scale for each 32 of them.
    ///
    /// # Panics
    /// When heads are not of whole 32 numbers.
    pub fn q8_0(shape: KvShape) -> Self {
        assert!(
            shape.head_dim.is_multiple_of(SCALE_DIMS),
            "Q8_0 for heads of {} numbers",
            shape.head_dim
        );
        let zeros = || ScaledBytes::zeros(BLOCK_POSITIONS * shape.row_len());
        let (keys, values) = (zeros(), shape.values_in_keys.is_none().then(zeros));
        let numbers = Numbers::Q8_0 { keys, values };
        Self { shape, numbers }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        match &self.numbers {
            Numbers::F16 { keys, values } => {
                let values = values.as_ref().map_or(0, |values| size_of_val(&**values));
                size_of_val(&**keys) + values
            }
            Numbers::Q8_0 { keys, values } => {
                keys.len() + values.as_ref().map_or(0, ScaledBytes::len)
            }
        }
    }

    /// Writes keys and values of one position (each `kv_heads * head_dim` numbers) into their place. Where keys are values, too, there are no
    /// others: `value` is empty.
    ///
    /// # Panics
    /// When `position` is not below [`BLOCK_POSITIONS`], or a row has the wrong length.
    pub fn store(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let head_dim = self.shape.head_dim;
        let (key_place, value_place) = places(self.shape, position, (key.len(), value.len()));
        match &mut self.numbers {
            Numbers::F16 { keys, values } => {
                store_f16(keys, head_dim, key, key_place);
                if let Some(values) = values {
                    store_f16(values, head_dim, value, value_place);
                }
            }
            Numbers::Q8_0 { keys, values } => {
                keys.store(head_dim, position, key, key_place);
                if let Some(values) = values {
                    values.store(head_dim, position, value, value_place);
                }
            }
        }
    }

    /// Reads keys and values of one position, the reverse of [`store`](Self::store): as they are, or bytes times their scales as F16.
    ///
    /// # Panics
    /// As there.
    pub fn load(&self, position: usize, key: &mut [f16], value: &mut [f16]) {
        let head_dim = self.shape.head_dim;
        let (key_place, value_place) = places(self.shape, position, (key.len(), value.len()));
        match &self.numbers {
            Numbers::F16 { keys, values } => {
                load_f16(keys, head_dim, key, key_place);
                if let Some(values) = values {
                    load_f16(values, head_dim, value, value_place);
                }
            }
            Numbers::Q8_0 { keys, values } => {
                keys.load(head_dim, position, key, key_place);
                if let Some(values) = values {
                    values.load(head_dim, position, value, value_place);
                }
            }
        }
    }

    pub(super) fn shape(&self) -> KvShape {
        self.shape
    }

    pub(super) fn head(&self, kv_head: usize) -> Head<'_> {
        let (head_dim, value_dim) = (self.shape.head_dim, self.shape.value_dim());
        let len = BLOCK_POSITIONS * head_dim;
        let own = kv_head * len..(kv_head + 1) * len;
        match &self.numbers {
            Numbers::F16 { keys, values } => match values {
                Some(values) => Head::F16(F16Head::new(head_dim, &keys[own.clone()], &values[own])),
                None => Head::LatentF16(LatentF16Head::new(head_dim, value_dim, &keys[own])),
            },
            Numbers::Q8_0 { keys, values } => match values {
                Some(values) => {
                    Head::Q8_0(Q8_0Head::new(head_dim, keys.part(&own), values.part(&own)))
                }
                None => Head::LatentQ8_0(LatentQ8_0Head::new(head_dim, value_dim, keys.part(&own))),
            },
        }
    }
}

impl ScaledBytes {
    fn zeros(len: usize) -> Self {
        Self {
            bytes: vec![0; len].into_boxed_slice(),
            scales: vec![f16::ZERO; len / SCALE_DIMS].into_boxed_slice(),
        }
    }

    /// In bytes.
    fn len(&self) -> usize {
        self.bytes.len() + size_of_val(&*self.scales)
    }

    /// These bytes and their scales.
    fn part(&self, bytes: &Range<usize>) -> (&[i8], &[f16]) {
        let scales = bytes.start / SCALE_DIMS..bytes.end / SCALE_DIMS;
        (&self.bytes[bytes.clone()], &self.scales[scales])
    }

    /// Reads each head of a row from its part, where `place` says.
    fn load(
        &self,
        head_dim: usize,
        position: usize,
        row: &mut [f16],
        place: impl Fn(usize) -> usize,
    ) {
        let len = BLOCK_POSITIONS * head_dim;
        let heads = self.bytes.chunks_exact(len);
        let scales = self.scales.chunks_exact(len / SCALE_DIMS);
        for ((head, scales), row) in heads.zip(scales).zip(row.chunks_exact_mut(head_dim)) {
            for (dim, number) in row.iter_mut().enumerate() {
                let scale = scales[dim / SCALE_DIMS * BLOCK_POSITIONS + position];
                *number = saturating_f16(f32::from(head[place(dim)]) * scale.to_f32());
            }
        }
    }

    /// Writes each head of a row into its part; `place` is where a dimension lies in it.
    fn store(
        &mut self,
        head_dim: usize,
        position: usize,
        row: &[f32],
        place: impl Fn(usize) -> usize,
    ) {
        let len = BLOCK_POSITIONS * head_dim;
        let heads = self.bytes.chunks_exact_mut(len);
        let scales = self.scales.chunks_exact_mut(len / SCALE_DIMS);
        for ((head, scales), row) in heads.zip(scales).zip(row.chunks_exact(head_dim)) {
            for (block, numbers) in row.as_chunks::<SCALE_DIMS>().0.iter().enumerate() {
                let (scale, bytes) = quantized(numbers);
                scales[block * BLOCK_POSITIONS + position] = scale;
                for (dim, byte) in (block * SCALE_DIMS..).zip(bytes) {
                    head[place(dim)] = byte;
                }
            }
        }
    }
}

/// Where each dimension of a position's key, and of its value, lies in a head's part. Rows have so many numbers.
fn places(
    shape: KvShape,
    position: usize,
    found: (usize, usize),
) -> (impl Fn(usize) -> usize, impl Fn(usize) -> usize) {
    assert!(position < BLOCK_POSITIONS, "position {position} of a block");
    let KvShape {
        head_dim,
        values_in_keys,
        ..
    } = shape;
    let lens = (shape.row_len(), shape.value_row_len());
    assert_eq!(found, lens, "numbers of a position");
    let (group, lane) = (position / KEY_LANES, position % KEY_LANES);
    let value_place = move |dim| position * head_dim + dim;
    let key_place = move |dim| match values_in_keys {
        Some(_) => value_place(dim),
        None => (group * head_dim + dim) * KEY_LANES + lane,
    };
    (key_place, value_place)
}

fn load_f16(numbers: &[f16], head_dim: usize, row: &mut [f16], place: impl Fn(usize) -> usize) {
    let heads = numbers.chunks_exact(BLOCK_POSITIONS * head_dim);
    for (head, row) in heads.zip(row.chunks_exact_mut(head_dim)) {
        for (dim, number) in row.iter_mut().enumerate() {
            *number = head[place(dim)];
        }
    }
}

fn store_f16(numbers: &mut [f16], head_dim: usize, row: &[f32], place: impl Fn(usize) -> usize) {
    let heads = numbers.chunks_exact_mut(BLOCK_POSITIONS * head_dim);
    for (head, row) in heads.zip(row.chunks_exact(head_dim)) {
        for (dim, number) in row.iter().enumerate() {
            head[place(dim)] = saturating_f16(*number);
        }
    }
}

/// Bytes in -127..=127 and their scale. Numbers beyond 127 times the largest F16 become that; NaN makes the scale NaN.
fn quantized(numbers: &[f32; SCALE_DIMS]) -> (f16, [i8; SCALE_DIMS]) {
    if numbers.iter().any(|number| number.is_nan()) {
        return (f16::NAN, [0; SCALE_DIMS]);
    }
    let scale = saturating_f16(largest_magnitude(numbers) / 127.0);
    // Of the scale as it is stored, so that its rounding is no error of the numbers.
    let inverse = if scale > f16::ZERO {
        1.0 / scale.to_f32()
    } else {
        0.0
    };
    let mut bytes = [0; SCALE_DIMS];
    for (byte, number) in bytes.iter_mut().zip(numbers) {
        let steps = (number * inverse).clamp(-127.0, 127.0);
        *byte = (steps + ROUNDER).to_bits() as i8;
    }
    (scale, bytes)
}

fn saturating_f16(number: f32) -> f16 {
    const LARGEST: f32 = 65_504.0;
    f16::from_f32(number.clamp(-LARGEST, LARGEST))
}
