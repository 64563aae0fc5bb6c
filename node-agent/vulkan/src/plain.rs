//! Numbers as the bytes that are copied to a GPU and back.

/// Numbers of which every pattern of bits is one, and without gaps between them.
pub trait Plain: Copy + private::Sealed {}

mod private {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for u32 {}
    impl Sealed for f32 {}
}

impl Plain for u8 {}
impl Plain for u32 {}
impl Plain for f32 {}

/// The bytes of `numbers`, in this machine's order, which is the GPU's.
pub(crate) fn bytes<T: Plain>(numbers: &[T]) -> &[u8] {
    // SAFETY: a `Plain` has no gaps, and all of the slice may be read as bytes.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// The same, to be overwritten.
pub(crate) fn bytes_mut<T: Plain>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every pattern of bits is a `Plain`.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}
