//! Which bytes of a model file a member needs.
//!
//! Decides: every member needs the header and RoPE's divisors; a layer's tensors go with the layer; rank 0 needs everything else
//! (embedding, output norm, output head). Refuses: layers that the file does not have.

use std::ops::Range;

use prima_gguf::{FilePart, Gguf};
use prima_model::{Place, layer_of};

/// Why a member's share cannot be determined.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TensorsError {
    #[error(
        "layer {layer}: expected a layer of the model file, which has no tensors for it: plan again for this file"
    )]
    NoLayer { layer: usize },
}

/// The model's byte ranges that the member with `layers` needs, in order and apart from each other.
///
/// # Errors
/// [`TensorsError::NoLayer`] for a layer that the file does not have.
pub fn ranges(
    gguf: &Gguf,
    layers: &[Range<usize>],
    rank0: bool,
) -> Result<Vec<Range<u64>>, TensorsError> {
    for layer in layers.iter().cloned().flatten() {
        if !gguf
            .tensors
            .iter()
            .any(|tensor| layer_of(&tensor.name) == Some(layer))
        {
            return Err(TensorsError::NoLayer { layer });
        }
    }
    let needed = gguf
        .tensors
        .iter()
        .filter(|tensor| match Place::of(&tensor.name) {
            Place::Layer(layer) => layers.iter().any(|window| window.contains(&layer)),
            Place::EveryLayer => true,
            Place::Embedding | Place::OutputHead | Place::Other => rank0,
        });
    let mut ranges: Vec<Range<u64>> = needed
        .map(|tensor| tensor.offset..tensor.offset + tensor.byte_len)
        .collect();
    ranges.extend(gguf.parts.iter().map(FilePart::header));
    // Ranges closer than the alignment have only padding between them.
    Ok(merged(ranges, gguf.alignment - 1))
}

/// What of the model's `ranges` is in its file `part`, in offsets of that file.
pub fn of_part(part: &FilePart, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let own = ranges.iter().map(|range| part.own(range));
    own.filter(|range| !range.is_empty()).collect()
}

/// Bytes in `ranges`, which do not overlap.
pub fn total_bytes(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// `ranges` in order, without empty ones; those that overlap, touch, or have at most `gap` bytes between them become one.
pub(crate) fn merged(mut ranges: Vec<Range<u64>>, gap: u64) -> Vec<Range<u64>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(gap) => {
                last.end = last.end.max(range.end)
            }
            _ => merged.push(range),
        }
    }
    merged
}

/// The parts of `wanted` not in `present`; both merged.
pub(crate) fn without(wanted: &[Range<u64>], present: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut missing = Vec::new();
    for range in wanted {
        let mut at = range.start;
        // The first that reaches past the range's start; what follows it is in order.
        let first = present.partition_point(|there| there.end <= range.start);
        for there in present[first..]
            .iter()
            .take_while(|there| there.start < range.end)
        {
            if at < there.start {
                missing.push(at..there.start);
            }
            at = there.end;
        }
        if at < range.end {
            missing.push(at..range.end);
        }
    }
    missing
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prima_gguf::writer::GgufWriter;
    use prima_gguf::{GgmlType, TensorInfo};
    use proptest::prelude::*;

    use super::*;

    /// Tensors of 40 bytes, so that there is padding behind each.
    fn model(names: &[&str]) -> Gguf {
        let mut writer = GgufWriter::new();
        for name in names {
            writer.tensor(name, GgmlType::F32, &[10]);
        }
        let mut data = writer.write_header(Vec::new()).unwrap();
        for _ in names {
            data.tensor(&[1; 40]).unwrap();
        }
        let file = data.finish().unwrap();
        Gguf::parse("model", &file, file.len() as u64).unwrap()
    }

    fn tied() -> Gguf {
        model(&[
            "token_embd.weight",
            "blk.0.attn_q.weight",
            "blk.0.ffn_up.weight",
            "rope_freqs.weight",
            "blk.1.attn_q.weight",
            "blk.10.attn_q.weight",
            "output_norm.weight",
        ])
    }

    fn names(gguf: &Gguf, ranges: &[Range<u64>]) -> Vec<String> {
        let inside = |tensor: &&TensorInfo| {
            ranges.iter().any(|range| {
                range.start <= tensor.offset && tensor.offset + tensor.byte_len <= range.end
            })
        };
        gguf.tensors
            .iter()
            .filter(inside)
            .map(|tensor| tensor.name.clone())
            .collect()
    }

    #[test]
    fn a_member_gets_its_layers_and_what_all_layers_use() {
        let gguf = tied();
        let ranges = ranges(&gguf, &[1..2], false).unwrap();
        assert_eq!(
            names(&gguf, &ranges),
            ["rope_freqs.weight", "blk.1.attn_q.weight"]
        );
        let data = gguf.data_offset;
        // Tensors lie 64 bytes apart; these two are neighbours.
        assert_eq!(ranges, [0..data, data + 3 * 64..data + 4 * 64 + 40]);
        assert_eq!(total_bytes(&ranges), data + 104);
    }

    #[test]
    fn rank_0_also_gets_the_ends_of_the_model() {
        let gguf = tied();
        let ranges = ranges(&gguf, &[0..1, 10..11], true).unwrap();
        assert_eq!(
            names(&gguf, &ranges),
            [
                "token_embd.weight",
                "blk.0.attn_q.weight",
                "blk.0.ffn_up.weight",
                "rope_freqs.weight",
                "blk.10.attn_q.weight",
                "output_norm.weight"
            ]
        );
        assert_eq!(
            names(&gguf, &super::ranges(&gguf, &[], true).unwrap()),
            [
                "token_embd.weight",
                "rope_freqs.weight",
                "output_norm.weight"
            ]
        );
    }

    #[test]
    fn experts_go_with_their_layer() {
        let gguf = model(&[
            "token_embd.weight",
            "blk.0.ffn_gate_exps.weight",
            "blk.0.ffn_gate_inp.weight",
            "blk.1.ffn_gate_exps.weight",
            "blk.1.exp_probs_b.bias",
            "blk.1.ffn_down_shexp.weight",
        ]);
        let ranges = ranges(&gguf, &[1..2], false).unwrap();
        let expected = [
            "blk.1.ffn_gate_exps.weight",
            "blk.1.exp_probs_b.bias",
            "blk.1.ffn_down_shexp.weight",
        ];
        assert_eq!(names(&gguf, &ranges), expected);
    }

    #[test]
    fn a_layer_that_the_file_has_not_is_an_error() {
        assert_eq!(
            ranges(&tied(), &[1..3], false),
            Err(TensorsError::NoLayer { layer: 2 })
        );
        assert!(ranges(&tied(), &[usize::MAX - 1..usize::MAX], false).is_err());
    }

    fn some_ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
        prop::collection::vec(
            (0u64..200, 0u64..30).prop_map(|(start, len)| start..start + len),
            0..20,
        )
    }

    fn bytes(ranges: &[Range<u64>]) -> BTreeSet<u64> {
        ranges.iter().cloned().flatten().collect()
    }

    proptest! {
        #[test]
        fn merging_keeps_every_byte_and_adds_only_narrow_gaps(ranges in some_ranges(), gap in 0u64..9) {
            let merged = merged(ranges.clone(), gap);
            let (before, after) = (bytes(&ranges), bytes(&merged));
            prop_assert!(before.is_subset(&after));
            prop_assert_eq!(total_bytes(&merged), after.len() as u64);
            prop_assert!(merged.windows(2).all(|pair| pair[0].end + gap < pair[1].start));
            for added in after.difference(&before) {
                // Within the gap there are asked-for bytes on both sides.
                let below = before.range(..added).next_back().unwrap();
                let above = before.range(added..).next().unwrap();
                prop_assert!(above - below - 1 <= gap);
            }
        }

        #[test]
        fn what_is_missing_is_the_difference(wanted in some_ranges(), present in some_ranges()) {
            let (wanted, present) = (merged(wanted, 0), merged(present, 0));
            let missing = without(&wanted, &present);
            let expected: BTreeSet<u64> = bytes(&wanted).difference(&bytes(&present)).copied().collect();
            prop_assert_eq!(bytes(&missing), expected);
            prop_assert_eq!(total_bytes(&missing), bytes(&missing).len() as u64);
        }
    }
}
