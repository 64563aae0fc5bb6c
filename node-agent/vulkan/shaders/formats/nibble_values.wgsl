// Formats whose nibbles stand for the sixteen signed bytes in VALUES, four a word.

fn looked_up(nibbles: vec4u) -> vec4u {
    return vec4u(values_of(nibbles.x), values_of(nibbles.y), values_of(nibbles.z), values_of(nibbles.w));
}

fn values_of(nibbles: u32) -> u32 {
    return value_of(nibbles & 15u)
        | (value_of((nibbles >> 8u) & 15u) << 8u)
        | (value_of((nibbles >> 16u) & 15u) << 16u)
        | (value_of((nibbles >> 24u) & 15u) << 24u);
}

fn value_of(nibble: u32) -> u32 {
    let values = VALUES;
    return (values[nibble / 4u] >> (8u * (nibble % 4u))) & 0xffu;
}
