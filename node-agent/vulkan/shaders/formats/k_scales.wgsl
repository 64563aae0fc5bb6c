// The scale and the minimum of a group of 32 in blocks of Q4_K and Q5_K: d: f16, dmin: f16, then 12 bytes with eight of each, 6 bits
// wide. The first four of each are in whole bytes, whose upper two bits are the upper bits of the last four.
fn scale_and_minimum(block: u32, group: u32) -> vec2f {
    let header = words_at(block);
    let bytes = header.yzw >> vec3u(8u * (group % 4u));
    var packed = bytes.xy & vec2u(63u);
    if group >= 4u {
        packed = (vec2u(bytes.z, bytes.z >> 4u) & vec2u(15u)) | ((bytes.xy >> vec2u(2u)) & vec2u(48u));
    }
    let d = unpack2x16float(header.x);
    return vec2f(d.x, -d.y) * vec2f(packed);
}
