//! Numbers of activations as the bytes that travel between members, in the plan's dtype.

use bytes::Bytes;
use half::{bf16, f16};
use prima_crds::v1alpha1::ring_plan::ActivationDtype;

/// Appends a payload's numbers to `out`.
pub fn append_numbers(dtype: ActivationDtype, payload: &[u8], out: &mut Vec<f32>) {
    match dtype {
        ActivationDtype::F32 => out.extend(
            payload
                .as_chunks::<4>()
                .0
                .iter()
                .map(|bytes| f32::from_le_bytes(*bytes)),
        ),
        ActivationDtype::BF16 => out.extend(
            payload
                .as_chunks::<2>()
                .0
                .iter()
                .map(|bytes| bf16::from_le_bytes(*bytes).to_f32()),
        ),
        ActivationDtype::F16 => out.extend(
            payload
                .as_chunks::<2>()
                .0
                .iter()
                .map(|bytes| f16::from_le_bytes(*bytes).to_f32()),
        ),
    }
}

/// A payload of these numbers, rounded to the dtype.
pub fn payload(dtype: ActivationDtype, numbers: &[f32]) -> Bytes {
    let mut bytes = vec![0; numbers.len() * dtype.bytes()];
    match dtype {
        ActivationDtype::F32 => {
            for (to, number) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
                *to = number.to_le_bytes();
            }
        }
        ActivationDtype::BF16 => {
            for (to, number) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(numbers) {
                *to = bf16::from_f32(*number).to_le_bytes();
            }
        }
        ActivationDtype::F16 => {
            for (to, number) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(numbers) {
                *to = f16::from_f32(*number).to_le_bytes();
            }
        }
    }
    bytes.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// F32 payloads carry every bit; the 16-bit dtypes carry what they can represent.
        #[test]
        fn payloads_carry_numbers(bits in prop::collection::vec(any::<u32>(), 0..64)) {
            let numbers: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
            let mut back = Vec::new();
            append_numbers(ActivationDtype::F32, &payload(ActivationDtype::F32, &numbers), &mut back);
            prop_assert_eq!(back.iter().map(|number| number.to_bits()).collect::<Vec<_>>(), bits);
            for dtype in [ActivationDtype::BF16, ActivationDtype::F16] {
                let halves: Vec<f32> = (0..32).map(|number| number as f32 / 4.0).collect();
                let mut back = Vec::new();
                append_numbers(dtype, &payload(dtype, &halves), &mut back);
                prop_assert_eq!(&back, &halves);
            }
        }
    }
}
