//! Where the files of a model lie in the offsets of its header.

use std::ops::Range;

/// One file of a model: where it lies in the offsets of the model's header. A model in one file has one, which begins at 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilePart {
    /// Offset of its first byte.
    pub start: u64,
    /// Bytes before its tensor data.
    pub header_len: u64,
    /// Bytes of the whole file.
    pub len: u64,
}

impl FilePart {
    /// The bytes of its header.
    pub fn header(&self) -> Range<u64> {
        self.start..self.start + self.header_len
    }

    /// What of `range` is in this file, in offsets of the file itself; perhaps nothing.
    pub fn own(&self, range: &Range<u64>) -> Range<u64> {
        let end = range.end.min(self.start + self.len).max(self.start);
        let start = range.start.clamp(self.start, end);
        start - self.start..end - self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_to_the_file() {
        let part = FilePart {
            start: 100,
            header_len: 10,
            len: 50,
        };
        assert_eq!(part.header(), 100..110);
        for (range, own) in [(100..110, 0..10), (90..120, 0..20), (140..200, 40..50)] {
            assert_eq!(part.own(&range), own);
        }
        assert!(part.own(&(0..100)).is_empty() && part.own(&(150..300)).is_empty());
    }
}
