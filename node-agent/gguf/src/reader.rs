//! A cursor over the header's bytes that cannot leave them.
//!
//! Decides: whether a field or a count that the file claims fits into what is left of the file. It distinguishes a file that
//! ends too early from a prefix that does, because fetching more cures the second. Refuses: to hand out a count that the
//! remaining bytes cannot hold, so callers may allocate by the counts they get.

use std::fmt::Display;

use crate::MAX_HEADER_LEN;
use crate::error::GgufError;

/// Reads little-endian fields one after another. `what` arguments name the field in errors, as in "the type of tensor 3".
pub(crate) struct Reader<'a> {
    file: &'a str,
    bytes: &'a [u8],
    file_len: u64,
    position: usize,
}

impl<'a> Reader<'a> {
    /// `bytes`: the file from offset 0, in whole or in part; what lies past `file_len` is never looked at.
    pub(crate) fn new(file: &'a str, bytes: &'a [u8], file_len: u64) -> Self {
        let available =
            usize::try_from(file_len).map_or(bytes.len(), |file_len| bytes.len().min(file_len));
        Reader {
            file,
            bytes: &bytes[..available],
            file_len,
            position: 0,
        }
    }

    /// Offset in the file of the next byte.
    pub(crate) fn position(&self) -> u64 {
        self.position as u64
    }

    pub(crate) fn file(&self) -> &'a str {
        self.file
    }

    /// The next `len` bytes.
    pub(crate) fn take(&mut self, len: u64, what: &dyn Display) -> Result<&'a [u8], GgufError> {
        let end = self.require(len, what)?;
        let taken = &self.bytes[self.position..end];
        self.position = end;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        what: &dyn Display,
    ) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(crate) fn u32(&mut self, what: &dyn Display) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u64(&mut self, what: &dyn Display) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A u64 count of things that take at least `min_len` bytes each, refused where the rest of the file cannot hold them.
    pub(crate) fn count(&mut self, min_len: u64, what: &dyn Display) -> Result<usize, GgufError> {
        self.count_up_to(u64::MAX, min_len, what)
    }

    /// The same, of at most `most` things.
    pub(crate) fn count_up_to(
        &mut self,
        most: u64,
        min_len: u64,
        what: &dyn Display,
    ) -> Result<usize, GgufError> {
        let offset = self.position();
        let count = self.u64(what)?;
        let left = self.file_len - self.position();
        match count.checked_mul(min_len) {
            Some(total) if total <= left => {
                if count > most {
                    return Err(self.invalid(offset, what, format_args!("at most {most}"), count));
                }
                self.require(
                    total,
                    &format_args!("{count} times at least {min_len} bytes for {what}"),
                )?;
            }
            _ => {
                let expected = format!(
                    "at most {} (of at least {min_len} bytes each, with {left} bytes left)",
                    left / min_len
                );
                return Err(self.invalid(offset, what, expected, count));
            }
        }
        // `require` checked the total against the length of a slice, so the count fits.
        Ok(count as usize)
    }

    /// A string: u64 length in bytes, then UTF-8. Only the header's end bounds it.
    pub(crate) fn string(&mut self, what: &dyn Display) -> Result<&'a str, GgufError> {
        self.string_up_to(u64::MAX, what)
    }

    /// The same, of at most `most` bytes.
    pub(crate) fn string_up_to(
        &mut self,
        most: u64,
        what: &dyn Display,
    ) -> Result<&'a str, GgufError> {
        let offset = self.position();
        let len = self.u64(&format_args!("the length of {what}"))?;
        if len > most {
            return Err(self.invalid(
                offset,
                &format_args!("the length of {what}"),
                format!("at most {most} bytes"),
                len,
            ));
        }
        let start = self.position();
        let bytes = self.take(len, &format_args!("{len} bytes of {what}"))?;
        std::str::from_utf8(bytes).map_err(|error| {
            let bad = error.valid_up_to();
            // An excerpt only: the string may be as long as the header.
            let excerpt = &bytes[bad.saturating_sub(16)..bytes.len().min(bad + 16)];
            self.invalid(
                start + bad as u64,
                what,
                "UTF-8",
                format_args!(
                    "byte 0x{:02x} in \"{}\"",
                    bytes[bad],
                    excerpt.escape_ascii()
                ),
            )
        })
    }

    /// An error about the field `what` at `offset`.
    pub(crate) fn invalid(
        &self,
        offset: u64,
        what: &dyn Display,
        expected: impl Display,
        found: impl Display,
    ) -> GgufError {
        GgufError::Invalid {
            file: self.file.to_owned(),
            field: what.to_string(),
            offset,
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    /// Checks that `len` more bytes are at hand; returns the index of the first byte behind them.
    fn require(&self, len: u64, what: &dyn Display) -> Result<usize, GgufError> {
        let offset = self.position();
        let file = || self.file.to_owned();
        let expected = || what.to_string();
        let end = match offset.checked_add(len) {
            Some(end) if end <= self.file_len => end,
            _ => {
                return Err(GgufError::EndOfFile {
                    file: file(),
                    offset,
                    expected: expected(),
                    file_len: self.file_len,
                });
            }
        };
        if end > MAX_HEADER_LEN {
            return Err(GgufError::HeaderTooLarge {
                file: file(),
                offset,
                expected: expected(),
                limit: MAX_HEADER_LEN,
            });
        }
        let have = self.bytes.len() as u64;
        if end > have {
            return Err(GgufError::NeedMoreBytes {
                file: file(),
                offset,
                expected: expected(),
                have,
                needed: end,
            });
        }
        Ok(end as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_prefix_asks_for_more_and_a_short_file_does_not() {
        let bytes = [1, 0, 0, 0, 2, 0];
        let mut reader = Reader::new("f", &bytes, 8);
        assert_eq!(reader.u32(&"a").unwrap(), 1);
        let error = reader.u32(&"b").unwrap_err();
        assert!(
            matches!(
                error,
                GgufError::NeedMoreBytes {
                    offset: 4,
                    have: 6,
                    needed: 8,
                    ..
                }
            ),
            "{error}"
        );

        let mut reader = Reader::new("f", &bytes, 6);
        assert_eq!(reader.u32(&"a").unwrap(), 1);
        let error = reader.u32(&"b").unwrap_err();
        assert!(
            matches!(
                error,
                GgufError::EndOfFile {
                    offset: 4,
                    file_len: 6,
                    ..
                }
            ),
            "{error}"
        );
    }

    #[test]
    fn bytes_past_the_file_length_are_not_looked_at() {
        let mut reader = Reader::new("f", &[1, 0, 0, 0], 3);
        assert!(matches!(
            reader.u32(&"a").unwrap_err(),
            GgufError::EndOfFile { file_len: 3, .. }
        ));
    }

    #[test]
    fn a_count_is_held_against_the_file_then_against_the_prefix() {
        let bytes = 3u64.to_le_bytes();
        assert!(matches!(
            Reader::new("f", &bytes, 8 + 11).count(4, &"n").unwrap_err(),
            GgufError::Invalid { offset: 0, .. }
        ));
        assert!(matches!(
            Reader::new("f", &bytes, 8 + 12).count(4, &"n").unwrap_err(),
            GgufError::NeedMoreBytes { needed: 20, .. }
        ));
        let whole: Vec<u8> = bytes.into_iter().chain([0; 12]).collect();
        assert_eq!(Reader::new("f", &whole, 8 + 12).count(4, &"n").unwrap(), 3);
        assert!(matches!(
            Reader::new("f", &u64::MAX.to_le_bytes(), u64::MAX)
                .count(2, &"n")
                .unwrap_err(),
            GgufError::Invalid { offset: 0, .. }
        ));
    }

    #[test]
    fn a_header_ends_at_the_limit_however_long_the_file() {
        let bytes = MAX_HEADER_LEN.to_le_bytes();
        let error = Reader::new("f", &bytes, u64::MAX)
            .count(1, &"n")
            .unwrap_err();
        assert!(
            matches!(
                error,
                GgufError::HeaderTooLarge {
                    offset: 8,
                    limit: MAX_HEADER_LEN,
                    ..
                }
            ),
            "{error}"
        );
    }
}
