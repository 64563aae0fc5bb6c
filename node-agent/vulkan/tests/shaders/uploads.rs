//! What is copied to the GPU while a pass computes, and what comes back.

use half::f16;
use prima_vulkan::{KV_POSITIONS, KvShape, pack_position, unpack_position};

use crate::support::{DEVICE, Random};

/// More than all pieces of memory have at once, in parts that begin anywhere.
#[test]
fn bytes_arrive_in_their_places() {
    let bytes: Vec<u8> = (0..60_000_003_usize)
        .map(|at| (at * 31 % 251) as u8)
        .collect();
    let buffer = DEVICE.upload_buffer(bytes.len() as u64).unwrap();
    let back = DEVICE.host_buffer(buffer.bytes()).unwrap();
    let mut uploads = DEVICE.uploads().unwrap();
    let mut uploading = uploads.begin();
    let ends = [5, 6, 1_000_001, 29_500_000, 29_500_000, bytes.len()];
    let mut first = 0;
    for end in ends {
        let part = &bytes[first..end];
        let to = first as u64..end as u64;
        let written = uploading.write(buffer.whole(), to, |done, out| {
            out.copy_from_slice(&part[done..][..out.len()]);
        });
        written.unwrap();
        first = end;
    }
    uploading.wait().unwrap();
    assert_eq!(uploading.bytes(), bytes.len() as u64);
    let mut pass = DEVICE.pass().unwrap();
    pass.barrier();
    pass.copy_back(buffer.whole(), &back, 0);
    pass.finish().unwrap();
    let mut found = vec![0_u8; bytes.len()];
    back.read(0, &mut found);
    assert!(found == bytes);
}

/// A slot is filled again as soon as what was recorded with it has run, while the pass goes on with another.
#[test]
fn slots_take_turns_within_a_pass() {
    const NUMBERS: usize = 4096;
    const TURNS: usize = 9;
    let rows: Vec<Vec<f32>> = (0..TURNS as u64)
        .map(|turn| Random(turn).numbers(NUMBERS))
        .collect();
    let bytes = 4 * NUMBERS as u64;
    let slots = [(); 2].map(|()| DEVICE.upload_buffer(bytes).unwrap());
    let copies = DEVICE.buffer(bytes * TURNS as u64).unwrap();
    let back = DEVICE.host_buffer(copies.bytes()).unwrap();
    let mut uploads = DEVICE.uploads().unwrap();
    let mut uploading = uploads.begin();
    let mut pass = DEVICE.pass().unwrap();
    for (turn, numbers) in rows.iter().enumerate() {
        if turn > 0 {
            pass.mark((turn - 1) % 2).unwrap();
        }
        if turn > 1 {
            pass.wait(turn % 2).unwrap();
        }
        let slot = slots[turn % 2].whole();
        uploading.write_all(slot, numbers).unwrap();
        uploading.wait().unwrap();
        pass.barrier();
        let first = turn as u64 * bytes;
        pass.copy(slot, copies.slice(first..first + bytes));
    }
    pass.barrier();
    pass.copy_back(copies.whole(), &back, 0);
    pass.finish().unwrap();
    let mut found = vec![0.0_f32; NUMBERS * TURNS];
    back.read(0, &mut found);
    assert!(found == rows.concat());
}

#[test]
fn positions_are_read_as_they_were_written() {
    for (kv_heads, head_dim, values_in_keys) in [(3, 10, None), (1, 96, Some(64))] {
        let kv = KvShape {
            kv_heads,
            head_dim,
            values_in_keys,
        };
        let row = kv_heads * head_dim;
        let value_row = if values_in_keys.is_some() { 0 } else { row };
        let mut block = vec![0_u32; (kv.block_bytes() / 4) as usize];
        let numbers = |seed: u64, count: usize| -> Vec<f16> {
            let numbers = Random(seed).numbers(count);
            numbers.into_iter().map(f16::from_f32).collect()
        };
        let rows: Vec<[Vec<f16>; 2]> = (0..KV_POSITIONS as u64)
            .map(|seed| [numbers(2 * seed, row), numbers(2 * seed + 1, value_row)])
            .collect();
        for (position, [keys, values]) in rows.iter().enumerate() {
            pack_position(&mut block, position, keys, values);
        }
        for (position, expected) in rows.iter().enumerate() {
            let mut found = [row, value_row].map(|len| vec![f16::ZERO; len]);
            let [keys, values] = &mut found;
            unpack_position(&block, position, keys, values);
            assert_eq!(&found, expected, "position {position} of {kv:?}");
        }
    }
}
