//! The device, reproducible numbers, and what both sides of a comparison are given.

use std::sync::LazyLock;

use half::f16;
use prima_gguf::GgmlType;
use prima_vulkan::{
    Buffer, Device, Facts, GpuKind, Gpus, Heads, Pass, Plain, Rows, SequenceRows, input_bytes,
};

/// One device for all tests: kernels are compiled once.
pub static DEVICE: LazyLock<Device> = LazyLock::new(|| {
    let device = open();
    eprintln!("{}: {:?}", device.facts().name, device.abilities());
    device
});

/// The GPU that is tested, opened anew.
pub fn open() -> Device {
    let gpus = Gpus::find().expect("Vulkan, with Debian's mesa-vulkan-drivers");
    let real = std::env::var_os("PRIMA_TEST_GPU").is_some();
    let wanted = |facts: &Facts| (facts.kind != GpuKind::Software) == real;
    let device = gpus.facts().position(wanted);
    Device::open(&gpus, device.expect("a GPU, or lavapipe")).unwrap()
}

/// Reproducible numbers in -1..1 (SplitMix64).
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn numbers(&mut self, count: usize) -> Vec<f32> {
        let number = |_| (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        (0..count).map(number).collect()
    }

    /// Blocks of any bits, but with scales that are numbers: in all formats F16 numbers lie at even bytes, so the upper byte of each
    /// pair has its exponent kept small. What else these bytes are takes every value that it then can.
    pub fn blocks(&mut self, format: GgmlType, count: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..count * format.block_bytes())
            .map(|_| self.next() as u8)
            .collect();
        for block in bytes.chunks_exact_mut(format.block_bytes()) {
            for &at in scales_at(format) {
                let scale = f16::from_f32(0.01 + 0.001 * f32::from(block[at] % 16));
                block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
            match format {
                GgmlType::F32 => block.copy_from_slice(&self.numbers(1)[0].to_le_bytes()),
                GgmlType::F16 => {
                    block.copy_from_slice(&f16::from_f32(self.numbers(1)[0]).to_le_bytes())
                }
                GgmlType::BF16 => block.copy_from_slice(&self.numbers(1)[0].to_le_bytes()[2..]),
                GgmlType::Mxfp4 => block[0] = 118 + block[0] % 8,
                _ => {}
            }
        }
        bytes
    }
}

/// Where blocks have F16 numbers.
fn scales_at(format: GgmlType) -> &'static [usize] {
    match format {
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 | GgmlType::Iq4Nl | GgmlType::Iq4Xs => {
            &[0]
        }
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q4K | GgmlType::Q5K => &[0, 2],
        GgmlType::Q2K => &[80, 82],
        GgmlType::Q3K => &[108],
        GgmlType::Q6K => &[208],
        _ => &[],
    }
}

pub fn buffer<T: Plain>(numbers: &[T]) -> Buffer {
    let buffer = DEVICE.buffer(size_of_val(numbers) as u64).unwrap();
    DEVICE.upload(buffer.whole(), numbers).unwrap();
    buffer
}

pub fn read(buffer: &Buffer) -> Vec<f32> {
    let mut numbers = vec![0.0; buffer.bytes() as usize / 4];
    let pass = DEVICE.pass().unwrap();
    pass.finish_reading(buffer.whole(), &mut numbers).unwrap();
    numbers
}

pub fn rows(buffer: &Buffer, count: usize) -> Rows<'_> {
    Rows {
        slice: buffer.whole(),
        count,
    }
}

/// That numbers are as expected, to within `bound` of the largest of them.
#[track_caller]
pub fn assert_close(found: &[f32], expected: &[f32], bound: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected
        .iter()
        .fold(0.0_f32, |most, number| most.max(number.abs()));
    assert!(
        largest > 0.0 && largest.is_finite(),
        "{what}: nothing to compare"
    );
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs() / largest;
        assert!(off <= bound, "{what}, number {i}: {found} for {expected}");
    }
}

/// Makes numbers of what they are rounded to, in sixteens as kernels do it: rounded again, they stay.
pub fn rounded_to_bytes(numbers: &mut [f32]) {
    for sixteen in numbers.chunks_mut(16) {
        let largest = sixteen.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        for x in sixteen.iter_mut().filter(|_| largest > 0.0) {
            let byte = (*x * (127.0 / largest)).round();
            *x = byte * (largest / 127.0);
        }
    }
}

/// What rows become that are only rounded to bytes.
pub fn packed(numbers: &Buffer, count: usize, width: usize) -> Vec<u32> {
    let room = DEVICE.buffer(input_bytes(count, width)).unwrap();
    let mut pass = DEVICE.pass().unwrap();
    pass.input(rows(numbers, count), width, room.whole())
        .unwrap();
    pass.finish().unwrap();
    packed_in(&room, count * width)
}

/// So many numbers as they were rounded, sixteen in six words, without what is never written behind them: kernels read sixteen bytes at once.
pub fn packed_in(room: &Buffer, numbers: usize) -> Vec<u32> {
    let mut words = words(room);
    words.truncate(numbers / 16 * 6);
    words
}

pub fn words(room: &Buffer) -> Vec<u32> {
    // A buffer is never empty, even if it was asked to be.
    if room.bytes() <= 4 {
        return Vec::new();
    }
    read(room).into_iter().map(f32::to_bits).collect()
}

/// Keys and values as they are, each behind those before.
pub fn append<'a>(
    pass: &mut Pass<'a>,
    sequence: SequenceRows<'a>,
    keys: &'a Buffer,
    values: &'a Buffer,
) {
    pass.prepare_heads(Heads {
        sequence,
        heads: 0,
        queries: keys.whole(),
        keys: keys.whole(),
        values: values.whole(),
        norms: None,
        rotation: None,
    })
    .unwrap();
    pass.barrier();
}
