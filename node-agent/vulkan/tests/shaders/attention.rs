//! Attention to keys and values in blocks.

use half::f16;
use prima_vulkan::{
    Attention, Device, FEW_ROWS, KV_POSITIONS, KvShape, SequenceRows, attention_groups,
    attention_part_bytes, input_bytes,
};

use crate::support::{
    DEVICE, Random, append, assert_close, buffer, packed, packed_in, read, rows, words,
};

/// What an attention is tried with.
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Positions held, then rows that come.
    held: usize,
    rows: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    temperature: Option<(f32, usize)>,
    /// Whether each head has one.
    sinks: bool,
}

const PLAIN: Case = Case {
    heads: 4,
    kv_heads: 2,
    head_dim: 32,
    held: 0,
    rows: 1,
    window: None,
    softcap: None,
    temperature: None,
    sinks: false,
};

#[test]
fn attention_sees_what_it_should() {
    let plain = PLAIN;
    for case in [
        Case { ..plain },
        Case { held: 63, ..plain },
        Case { held: 64, ..plain },
        Case {
            held: 200,
            rows: 70,
            ..plain
        },
        Case {
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            held: 5,
            rows: 40,
            ..plain
        },
        Case {
            heads: 2,
            kv_heads: 2,
            head_dim: 256,
            held: 100,
            rows: 3,
            ..plain
        },
        Case {
            head_dim: 8,
            held: 70,
            ..plain
        },
        Case {
            head_dim: 136,
            held: 70,
            rows: 2,
            ..plain
        },
        Case {
            heads: 16,
            kv_heads: 1,
            head_dim: 96,
            held: 70,
            rows: 2,
            ..plain
        },
        Case {
            held: 300,
            rows: 30,
            window: Some(20),
            ..plain
        },
        Case {
            held: 130,
            rows: 5,
            window: Some(1),
            ..plain
        },
        // Few rows, and so many groups that each takes all blocks.
        Case {
            heads: 32,
            kv_heads: 32,
            held: 130,
            rows: 9,
            ..plain
        },
        // Parts of several blocks, the last of fewer.
        Case {
            held: 33 * 64,
            ..plain
        },
        Case {
            held: 2500,
            rows: 3,
            window: Some(2200),
            ..plain
        },
        Case {
            held: 20,
            rows: 9,
            softcap: Some(0.5),
            ..plain
        },
        Case {
            held: 90,
            rows: 20,
            temperature: Some((0.3, 16)),
            ..plain
        },
        // In one part, in several, and in none.
        Case {
            sinks: true,
            ..plain
        },
        Case {
            heads: 9,
            kv_heads: 3,
            held: 33 * 64,
            rows: 2,
            sinks: true,
            ..plain
        },
        Case {
            heads: 32,
            kv_heads: 32,
            held: 30,
            rows: 30,
            window: Some(8),
            sinks: true,
            ..plain
        },
    ] {
        attention(&DEVICE, &case);
    }
}

/// In parts of several blocks, to results that are rounded, and to results at once, with a window.
#[test]
fn attention_group_by_group_is_the_same_to_the_bit() {
    let slow = DEVICE.clone().with_most_part_flop(1);
    for case in [
        Case {
            held: 33 * 64,
            rows: 9,
            ..PLAIN
        },
        Case {
            heads: 32,
            kv_heads: 32,
            held: 130,
            rows: 9,
            ..PLAIN
        },
        Case {
            heads: 32,
            kv_heads: 32,
            held: 30,
            rows: 30,
            window: Some(8),
            sinks: true,
            ..PLAIN
        },
    ] {
        assert!(attention(&slow, &case) == attention(&DEVICE, &case));
    }
}

/// The bits of what comes out.
fn attention(device: &Device, case: &Case) -> Vec<u32> {
    let Case {
        heads,
        kv_heads,
        head_dim,
        held,
        rows: new,
        window,
        softcap,
        temperature,
        sinks,
    } = *case;
    let what =
        format!("{heads} heads of {head_dim}, {held} + {new}, window {window:?}, sinks {sinks}");
    let (width, end) = (kv_heads * head_dim, held + new);
    let mut random = Random((held + heads) as u64);
    let queries: Vec<f32> = random
        .numbers(new * heads * head_dim)
        .iter()
        .map(|x| 3.0 * x)
        .collect();
    // Rounded to F16, since the cache is of that.
    let mut halves = || -> Vec<f32> {
        let numbers = random.numbers(end * width);
        numbers.iter().map(|x| f16::from_f32(*x).to_f32()).collect()
    };
    let (keys, values) = (halves(), halves());
    let sink_scores: Vec<f32> = random.numbers(heads).iter().map(|x| 5.0 * x).collect();
    let scale = 0.4;
    let mut expected = vec![0.0_f32; queries.len()];
    for row in 0..new {
        let position = held + row;
        let factor = temperature.map_or(1.0, |(t, n): (f32, usize)| {
            1.0 + f64::from(t) * ((position / n) as f64 + 1.0).ln()
        });
        let from = (position + 1).saturating_sub(window.unwrap_or(usize::MAX));
        for head in 0..heads {
            let query = &queries[(row * heads + head) * head_dim..][..head_dim];
            let at = |numbers: &[f32], position: usize| -> Vec<f32> {
                numbers[position * width + head / (heads / kv_heads) * head_dim..][..head_dim]
                    .to_vec()
            };
            let weights: Vec<f64> = (from..=position)
                .map(|seen| {
                    let key = at(&keys, seen);
                    let dot: f64 = query.iter().zip(&key).map(|(q, k)| f64::from(q * k)).sum();
                    let score = dot * scale * factor;
                    let cap = softcap.map(f64::from);
                    cap.map_or(score, |cap| cap * (score / cap).tanh()).exp()
                })
                .collect();
            let sink = match sinks {
                true => f64::from(sink_scores[head]).exp(),
                false => 0.0,
            };
            let sum = sink + weights.iter().sum::<f64>();
            for (seen, weight) in (from..=position).zip(&weights) {
                let out = &mut expected[(row * heads + head) * head_dim..][..head_dim];
                for (out, value) in out.iter_mut().zip(at(&values, seen)) {
                    *out += (weight / sum) as f32 * value;
                }
            }
        }
    }

    // Blocks lie in any order, and what a window has left behind is not there.
    let first_block = (held + 1).saturating_sub(window.unwrap_or(usize::MAX)) / KV_POSITIONS;
    let blocks: Vec<u32> = (0..(end.div_ceil(KV_POSITIONS) - first_block) as u32)
        .rev()
        .collect();
    let kv = KvShape {
        kv_heads,
        head_dim,
        values_in_keys: None,
    };
    let bytes = kv.block_bytes() as usize;
    // Not a number, wherever nothing is written.
    let cache = buffer(&vec![0xff_u8; blocks.len() * bytes]);
    let listed = buffer(&[&[77, 78], &blocks[..]].concat());
    let sequence = |rows: usize, first_row: usize, first_position: usize| SequenceRows {
        blocks: listed.whole(),
        blocks_at: 2,
        first_block,
        cache: cache.whole(),
        kv,
        rows,
        first_row,
        first_position,
    };
    let kept = first_block * KV_POSITIONS;
    let (keys, values) = (
        buffer(&keys[kept * width..]),
        buffer(&values[kept * width..]),
    );
    // Of a pass in which another sequence has the first row.
    let in_pass = buffer(&[vec![f32::NAN; heads * head_dim], queries].concat());
    let out = buffer(&vec![0.0_f32; (new + 1) * heads * head_dim]);
    let groups = attention_groups(new, heads, kv);
    let pass_rows = new + 1;
    let parts = attention_part_bytes(new, heads, kv, (pass_rows, groups));
    let parts = DEVICE.buffer(parts).unwrap();
    let sink_scores = buffer(&sink_scores);
    let room = DEVICE
        .buffer(input_bytes(pass_rows, heads * head_dim))
        .unwrap();
    let mut pass = device.pass().unwrap();
    if held > kept {
        append(&mut pass, sequence(held - kept, 0, kept), &keys, &values);
    }
    append(&mut pass, sequence(new, held - kept, held), &keys, &values);
    let attention = Attention {
        sequence: sequence(new, 1, held),
        heads,
        queries: in_pass.whole(),
        rotated: None,
        out: rows(&out, pass_rows),
        parts: parts.whole(),
        groups,
        scale: scale as f32,
        window,
        softcap,
        temperature,
        sinks: sinks.then(|| sink_scores.whole()),
    };
    pass.attend(attention).unwrap();
    pass.barrier();
    let width = heads * head_dim;
    pass.attended(&[attention], rows(&out, pass_rows), width, room.whole())
        .unwrap();
    pass.finish().unwrap();
    let found = read(&out);
    assert!(
        found[..heads * head_dim].iter().all(|x| *x == 0.0),
        "another's row"
    );
    assert_close(&found[heads * head_dim..], &expected, 1e-4, &what);
    if pass_rows <= FEW_ROWS {
        // Bytes, then scales and sums, without those of the other sequence's row, which never attends.
        let own = |words: Vec<u32>| {
            let (bytes, scales) = words.split_at(pass_rows * width / 4);
            [&bytes[width / 4..], &scales[width / 8..]].concat()
        };
        let expected = own(packed(&out, pass_rows, width));
        let found = own(packed_in(&room, pass_rows * width));
        assert_eq!(found, expected, "{what}, to be multiplied");
    }
    words(&out)
}
