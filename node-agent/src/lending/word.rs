//! The enrolment word: what a person carries from the machine that is lent to the one that borrows it. The borrower knows by its first part that
//! it talks to that machine and no other, and the lender by the second that the borrower was invited.

use std::fmt;
use std::str::FromStr;

use data_encoding::BASE32_NOPAD_NOCASE as BASE32;
use prima_member_process::{LENDER_PORT, lender_address};

use crate::ring::FingerprintStart;

/// How many bytes the invitation has. With [`super::door::MAX_WRONG`] tries, one in 5 * 10^10 who guess it is lucky.
pub const SECRET_BYTES: usize = 5;

pub type Secret = [u8; SECRET_BYTES];

/// 24 letters and digits (base32, RFC 4648), in groups of four.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// How the fingerprint of the lender's key begins.
    pub lender: FingerprintStart,
    pub secret: Secret,
}

const WORD_BYTES: usize = size_of::<FingerprintStart>() + SECRET_BYTES;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected the word that `prima agent` shows on the other machine: 24 letters and digits from 2 to 7"
)]
pub struct NoWord;

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = BASE32.encode(&[&self.lender[..], &self.secret].concat());
        for (at, letter) in letters.to_lowercase().chars().enumerate() {
            let gap = if at > 0 && at % 4 == 0 { "-" } else { "" };
            write!(f, "{gap}{letter}")?;
        }
        Ok(())
    }
}

impl FromStr for Word {
    type Err = NoWord;

    fn from_str(text: &str) -> Result<Self, NoWord> {
        let letters: String = text.chars().filter(|&letter| letter != '-').collect();
        let bytes = BASE32.decode(letters.as_bytes()).map_err(|_| NoWord)?;
        let bytes: [u8; WORD_BYTES] = bytes.try_into().map_err(|_| NoWord)?;
        Ok(Self {
            lender: std::array::from_fn(|at| bytes[at]),
            secret: std::array::from_fn(|at| bytes[size_of::<FingerprintStart>() + at]),
        })
    }
}

/// Why a text names no machine that is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLender {
    #[error("expected HOST:PORT#WORD; without a port it is {LENDER_PORT}")]
    Address,
    #[error(transparent)]
    Word(#[from] NoWord),
}

/// A machine that is lent, as the command line has it: `HOST` or `HOST:PORT`, and at the first time `#WORD`.
#[derive(Clone)]
pub struct Lender {
    /// HOST:PORT.
    pub address: String,
    pub word: Option<Word>,
}

impl FromStr for Lender {
    type Err = NoLender;

    fn from_str(text: &str) -> Result<Self, NoLender> {
        let (address, word) = match text.split_once('#') {
            Some((address, word)) => (address, Some(word)),
            None => (text, None),
        };
        Ok(Self {
            address: lender_address(address).ok_or(NoLender::Address)?,
            word: word.map(str::parse).transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORD: Word = Word {
        lender: [0, 1, 2, 3, 4, 5, 6, 7, 8, 255],
        secret: [9, 10, 11, 12, 13],
    };

    #[test]
    fn a_word_is_read_as_people_type_it() {
        let shown = WORD.to_string();
        assert_eq!(shown.len(), 24 + 5);
        for typed in [
            shown.clone(),
            shown.to_uppercase(),
            shown.replace('-', ""),
            format!("-{shown}"),
        ] {
            assert!(typed.parse() == Ok(WORD), "{typed}");
        }
        for bad in [
            "",
            "abcd",
            &shown[1..],
            &format!("{shown}aaaa"),
            &shown.replace('a', "1"),
        ] {
            assert!(bad.parse::<Word>() == Err(NoWord), "{bad}");
        }
    }

    #[test]
    fn a_lender_is_an_address_and_perhaps_a_word() {
        let read = |text: &str| text.parse::<Lender>();
        let lender = read(&format!("desk:9190#{WORD}")).ok().unwrap();
        assert_eq!(lender.address, "desk:9190");
        assert!(lender.word == Some(WORD));
        for (typed, address) in [
            ("desk", "desk:9190"),
            ("192.168.1.7", "192.168.1.7:9190"),
            ("[::1]:7000", "[::1]:7000"),
            ("[::1]", "[::1]:9190"),
            ("fd00::7", "[fd00::7]:9190"),
        ] {
            let known = read(typed).ok().unwrap();
            assert!(known.word.is_none());
            assert_eq!(known.address, address, "{typed}");
        }
        for (bad, expected) in [
            ("", NoLender::Address),
            (":9190", NoLender::Address),
            ("desk:0", NoLender::Address),
            ("desk:http", NoLender::Address),
            ("a desk", NoLender::Address),
            ("0.0.0.0:9190", NoLender::Address),
            ("desk:9190#", NoLender::Word(NoWord)),
            ("desk:9190#tulip", NoLender::Word(NoWord)),
        ] {
            assert_eq!(read(bad).err(), Some(expected), "{bad}");
        }
    }
}
