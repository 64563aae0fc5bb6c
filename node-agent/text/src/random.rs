//! Random numbers that are the same for a seed on every machine and in every version.
//!
//! Decides: the generator, xoshiro256++ (Blackman and Vigna, "Scrambled linear pseudorandom number generators", 2021), seeded through
//! SplitMix64 as its authors recommend. Refuses: secrets; its numbers can be predicted from earlier ones.
//!
//! The `rand` crates promise their sequences only per version of the crate; an answer should not change with an update.

/// A stream of random numbers.
#[derive(Debug, Clone)]
pub(crate) struct Random([u64; 4]);

impl Random {
    pub(crate) fn from_seed(seed: u64) -> Self {
        let mut counter = seed;
        Self(std::array::from_fn(|_| {
            counter = counter.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut bits = counter;
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            bits ^ (bits >> 31)
        }))
    }

    /// From 0 up to but without 1, in steps of 2^-53.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn next(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.0;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_sequences_come_out() {
        // SplitMix64 of seed 1234567, as in its reference implementation's tests.
        assert_eq!(
            Random::from_seed(1_234_567).0[..3],
            [
                6457827717110365317,
                3203168211198807973,
                9817491932198370423
            ]
        );
        // xoshiro256++ of state 1, 2, 3, 4.
        let mut random = Random([1, 2, 3, 4]);
        let numbers: [u64; 4] = std::array::from_fn(|_| random.next());
        assert_eq!(
            numbers,
            [41943041, 58720359, 3588806011781223, 3591011842654386]
        );
    }
}
