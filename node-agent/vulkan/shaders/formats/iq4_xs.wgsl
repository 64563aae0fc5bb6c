// d: f16, upper bits of the scales: 2 bytes, lower bits: 4 bytes, nibbles: 128 bytes; groups of 32 with scales from -32 to 31.
const BYTES = 136u;
const APART = 1u;

fn load_part(block: u32, part: u32, unit: u32) -> Loaded {
    let group = 2u * part + unit / 2u;
    let upper = (weights[block / 4u] >> (16u + 2u * group)) & 3u;
    let lower = (weights[block / 4u + 1u] >> (4u * group)) & 15u;
    let scale = f16_at(block) * (f32(lower | (upper << 4u)) - 32.0);
    return Loaded(looked_up(parts_at(block + 8u + 16u * group, 4u * (unit % 2u), 15u)), scale, 0.0);
}
