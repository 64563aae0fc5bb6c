//! What holds for every header that parsed, whatever the bytes were: checked here without the parser's own code.

use prima_gguf::Gguf;

/// Panics where `gguf` breaks a promise that its users build on.
pub fn check(gguf: &Gguf) {
    assert!(gguf.version == 2 || gguf.version == 3);
    assert!(gguf.alignment.is_power_of_two() && gguf.alignment >= 8);
    assert!(gguf.data_offset <= gguf.file_len);
    let mut ranges = Vec::new();
    for tensor in &gguf.tensors {
        assert!((1..=4).contains(&tensor.shape.len()));
        let weights = tensor
            .shape
            .iter()
            .fold(1u128, |product, &dimension| product * u128::from(dimension));
        let (block_len, block_bytes) = (
            tensor.ggml_type.block_len() as u128,
            tensor.ggml_type.block_bytes() as u128,
        );
        assert_eq!(u128::from(tensor.shape[0]) % block_len, 0);
        assert_eq!(
            weights / block_len * block_bytes,
            u128::from(tensor.byte_len)
        );
        assert_eq!(tensor.offset % gguf.alignment, 0);
        assert!(
            tensor.offset >= gguf.data_offset && tensor.offset + tensor.byte_len <= gguf.file_len
        );
        assert_eq!(
            gguf.tensor(&tensor.name),
            Some(tensor),
            "found by its name, and no other"
        );
        ranges.push((tensor.offset, tensor.offset + tensor.byte_len));
    }
    ranges.sort_unstable();
    assert!(
        ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0),
        "tensors overlap: {ranges:?}"
    );
    for (key, value) in gguf.metadata.iter() {
        assert!(!key.is_empty());
        assert!(
            std::ptr::eq(gguf.metadata.get(key).unwrap(), value),
            "found by its key, and no other"
        );
    }
}
