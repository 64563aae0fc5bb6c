// Quantized formats: what is loaded are sixteen signed bytes, four in a word, the first in the lowest bits; weight = scale * byte + add.
// Four sixteens that lie in the same bytes, or in neighbouring ones, are a part of a block of 256, best loaded together: `load_part` of a
// format loads one of the four. They are APART sixteens apart. Of blocks of 32, two are taken for a part.

struct Loaded {
    bytes: vec4u,
    scale: f32,
    add: f32,
}

fn unpacked(loaded: Loaded) -> Sixteen {
    return Sixteen(
        loaded.scale * vec4f(signed_bytes_of(loaded.bytes.x)) + loaded.add,
        loaded.scale * vec4f(signed_bytes_of(loaded.bytes.y)) + loaded.add,
        loaded.scale * vec4f(signed_bytes_of(loaded.bytes.z)) + loaded.add,
        loaded.scale * vec4f(signed_bytes_of(loaded.bytes.w)) + loaded.add,
    );
}

// Of each of the sixteen bytes from `byte` on: shifted right, then those bits of it that `mask` has.
fn parts_at(byte: u32, shift: u32, mask: u32) -> vec4u {
    return (words_at(byte) >> vec4u(shift)) & vec4u(mask * 0x01010101u);
}

// Weights of scale * (byte - offset).
fn centred(bytes: vec4u, scale: f32, offset: f32) -> Loaded {
    return Loaded(bytes, scale, -offset * scale);
}

// Bit i of `bits` as bit `place` of byte i.
fn bits_in_bytes(bits: u32, place: u32) -> vec4u {
    // Four bits side by side, each moved to a byte of its own.
    let fours = (vec4u(bits) >> vec4u(0u, 4u, 8u, 12u)) & vec4u(15u);
    return ((fours * vec4u(0x00204081u)) & vec4u(0x01010101u)) << vec4u(place);
}
