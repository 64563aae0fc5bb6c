// How kernels read weights: blocks of a format as the file has them, row after row, from a multiple of 4 bytes on. A format's file says
// how many weights a block has (BLOCK), its bytes (BYTES), and how sixteen consecutive weights are loaded, the `unit`th of a block;
// `unpacked` makes numbers of what was loaded.

// Sixteen consecutive weights.
struct Sixteen {
    a: vec4f,
    b: vec4f,
    c: vec4f,
    d: vec4f,
}

// The four bytes of a word as signed numbers.
fn signed_bytes_of(word: u32) -> vec4i {
    return (vec4i(bitcast<i32>(word)) << vec4u(24u, 16u, 8u, 0u)) >> vec4u(24u);
}
