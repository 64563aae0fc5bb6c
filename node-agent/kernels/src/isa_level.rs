//! Decides which instruction set the kernels of this process use: detected once, or lowered by
//! `PRIMA_CPU_LEVEL`. Refuses a level that the processor lacks; never guesses from a CPU name.

use std::fmt;

/// An instruction-set level for which kernels exist. Only levels that this processor has can be obtained; the `target_feature`
/// functions of the kernels rely on that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IsaLevel(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Sse41,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "aarch64")]
    NeonDotprod,
    #[cfg(target_arch = "aarch64")]
    NeonI8mm,
}

/// The environment variable that lowers the level, for tests and for comparing.
pub const LEVEL_VARIABLE: &str = "PRIMA_CPU_LEVEL";

/// Why a requested level cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IsaLevelError {
    #[error(
        "choosing the CPU kernels: {LEVEL_VARIABLE}={requested} is not a level that this processor has; it has: {available}"
    )]
    Unavailable {
        requested: String,
        available: String,
    },
}

impl IsaLevel {
    /// The plain Rust kernels, on every processor; what the other levels are tested against.
    pub const SCALAR: IsaLevel = IsaLevel(Kind::Scalar);

    /// The highest level that this processor has.
    pub fn detect() -> IsaLevel {
        Self::available().last().copied().unwrap_or(Self::SCALAR)
    }

    /// The levels that this processor has, lowest first.
    pub fn available() -> Vec<IsaLevel> {
        let known = Kind::ALL.iter().copied().filter(|kind| kind.is_here());
        known.map(IsaLevel).collect()
    }

    /// All levels that this build knows, lowest first: the level's name, and for each feature that it needs, the feature's name in Rust
    /// and whether this processor has it.
    pub fn known() -> Vec<(&'static str, Vec<(&'static str, bool)>)> {
        let known = Kind::ALL.iter().copied();
        known.map(|kind| (kind.name(), kind.features())).collect()
    }

    /// The level named by `PRIMA_CPU_LEVEL`, or the highest one where that is unset or empty.
    ///
    /// # Errors
    /// [`IsaLevelError::Unavailable`] for a name that is unknown or that this processor lacks.
    pub fn from_environment() -> Result<IsaLevel, IsaLevelError> {
        match std::env::var_os(LEVEL_VARIABLE) {
            Some(name) if !name.is_empty() => Self::by_name(&name.to_string_lossy()),
            _ => Ok(Self::detect()),
        }
    }

    /// The level called `name` (`scalar`; `sse4.1`, `avx2`, `avx-vnni`, `avx512`; `neon`, `neon-dotprod`, `neon-i8mm`).
    ///
    /// # Errors
    /// [`IsaLevelError::Unavailable`] for a name that is unknown or that this processor lacks.
    pub fn by_name(name: &str) -> Result<IsaLevel, IsaLevelError> {
        let available = Self::available();
        available
            .iter()
            .copied()
            .find(|level| level.name() == name)
            .ok_or_else(|| IsaLevelError::Unavailable {
                requested: name.to_string(),
                available: available
                    .iter()
                    .map(IsaLevel::name)
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }

    /// Which of the features that choose a level this processor has, by their names in Rust. Empty where no level needs any.
    pub fn detected_features() -> Vec<&'static str> {
        let mut names = Vec::new();
        for (name, present) in Kind::ALL.iter().copied().flat_map(Kind::features) {
            if present && !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// The name by which `PRIMA_CPU_LEVEL` knows this level.
    pub fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Whether its kernels fuse products with sums, as plain Rust's [`f32::mul_add`] does. Quantized products have the same bits at
    /// all levels that do; a processor without such an instruction rounds twice.
    pub fn fuses(&self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Sse41 => false,
            _ => true,
        }
    }

    pub(super) fn kind(self) -> Kind {
        self.0
    }
}

impl fmt::Display for IsaLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Kind {
    /// Lowest first.
    const ALL: &[Kind] = &[
        Kind::Scalar,
        #[cfg(target_arch = "x86_64")]
        Kind::Sse41,
        #[cfg(target_arch = "x86_64")]
        Kind::Avx2,
        #[cfg(target_arch = "x86_64")]
        Kind::AvxVnni,
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512Vnni,
        #[cfg(target_arch = "aarch64")]
        Kind::Neon,
        #[cfg(target_arch = "aarch64")]
        Kind::NeonDotprod,
        #[cfg(target_arch = "aarch64")]
        Kind::NeonI8mm,
    ];

    fn name(self) -> &'static str {
        match self {
            Kind::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Kind::Sse41 => "sse4.1",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::AvxVnni => "avx-vnni",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => "avx512",
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Kind::NeonDotprod => "neon-dotprod",
            #[cfg(target_arch = "aarch64")]
            Kind::NeonI8mm => "neon-i8mm",
        }
    }

    /// What it needs, and whether this processor has it.
    fn features(self) -> Vec<(&'static str, bool)> {
        #[cfg(target_arch = "x86_64")]
        let avx2 = [
            ("avx2", is_x86_feature_detected!("avx2")),
            ("fma", is_x86_feature_detected!("fma")),
            ("f16c", is_x86_feature_detected!("f16c")),
        ];
        #[cfg(target_arch = "aarch64")]
        let [neon, dotprod, i8mm] = [
            ("neon", std::arch::is_aarch64_feature_detected!("neon")),
            (
                "dotprod",
                std::arch::is_aarch64_feature_detected!("dotprod"),
            ),
            ("i8mm", std::arch::is_aarch64_feature_detected!("i8mm")),
        ];
        match self {
            Kind::Scalar => Vec::new(),
            #[cfg(target_arch = "x86_64")]
            Kind::Sse41 => vec![
                ("sse4.1", is_x86_feature_detected!("sse4.1")),
                ("ssse3", is_x86_feature_detected!("ssse3")),
            ],
            #[cfg(target_arch = "aarch64")]
            Kind::Neon => vec![neon],
            #[cfg(target_arch = "aarch64")]
            Kind::NeonDotprod => vec![neon, dotprod],
            #[cfg(target_arch = "aarch64")]
            Kind::NeonI8mm => vec![neon, dotprod, i8mm],
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => avx2.to_vec(),
            #[cfg(target_arch = "x86_64")]
            Kind::AvxVnni => [
                &avx2[..],
                &[("avxvnni", is_x86_feature_detected!("avxvnni"))],
            ]
            .concat(),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => [
                &avx2[..],
                &[
                    ("avx512f", is_x86_feature_detected!("avx512f")),
                    ("avx512bw", is_x86_feature_detected!("avx512bw")),
                    ("avx512vl", is_x86_feature_detected!("avx512vl")),
                    ("avx512dq", is_x86_feature_detected!("avx512dq")),
                    ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
                ],
            ]
            .concat(),
        }
    }

    fn is_here(self) -> bool {
        self.features().iter().all(|(_, present)| *present)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_available_level_is_found_by_its_name() {
        for level in IsaLevel::available() {
            assert_eq!(IsaLevel::by_name(level.name()).unwrap(), level);
        }
    }

    #[test]
    fn an_unknown_level_is_refused_with_the_list_of_what_there_is() {
        let error = IsaLevel::by_name("avx9000").unwrap_err().to_string();
        assert!(
            error.contains("avx9000") && error.contains("scalar"),
            "{error}"
        );
    }
}
