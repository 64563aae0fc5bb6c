// exponent: 1 byte, nibbles: 16 bytes; weight = 2^(exponent - 127) * the E2M1 number of the nibble (OCP Microscaling Formats 1.0).
const BYTES = 17u;

// Twice the numbers with one bit of sign, two of exponent and one of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
const VALUES = vec4u(0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);

fn load(block: u32, unit: u32) -> Loaded {
    // Half the power; the two least ones, of which half is subnormal, count as zero.
    let power = bitcast<f32>((max(byte_at(block), 1u) - 1u) << 23u);
    return Loaded(looked_up(parts_at(block + 1u, 4u * unit, 15u)), power, 0.0);
}
