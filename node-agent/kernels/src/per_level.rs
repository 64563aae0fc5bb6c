//! Functions whose body is plain Rust, compiled once for each level.

/// Defines a function that runs its body compiled for the given level: `fn name(level, arguments...)`. The
/// body is plain Rust that the compiler vectorises; to profit, all of it must be inlined.
macro_rules! per_level {
    ($(#[$meta:meta])* $vis:vis fn $name:ident(level, $($arg:ident : $ty:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        $vis fn $name(level: $crate::IsaLevel, $($arg: $ty),*) {
            #[inline(always)]
            fn body($($arg: $ty),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "sse4.1,ssse3")]
            fn sse41($($arg: $ty),*) {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
            fn avx512($($arg: $ty),*) {
                body($($arg),*)
            }

            match level.kind() {
                $crate::isa_level::Kind::Scalar => body($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: a `IsaLevel` of this kind exists only on processors that have these features.
                $crate::isa_level::Kind::Sse41 => unsafe { sse41($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::isa_level::Kind::Avx2 | $crate::isa_level::Kind::AvxVnni => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::isa_level::Kind::Avx512Vnni => unsafe { avx512($($arg),*) },
                // Everything on this architecture is compiled for NEON.
                #[cfg(target_arch = "aarch64")]
                $crate::isa_level::Kind::Neon
                | $crate::isa_level::Kind::NeonDotprod
                | $crate::isa_level::Kind::NeonI8mm => body($($arg),*),
            }
        }
    };
}
pub(super) use per_level;
