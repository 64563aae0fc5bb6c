//! Finds an entry by its name in a list that stays in file order: positions sorted by name, found by bisection.
//!
//! Refuses duplicates. Four bytes per entry and no second copy of a name, because the file decides how many
//! there are.

/// Positions of a list, sorted by the names at those positions.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NameIndex(Vec<u32>);

impl NameIndex {
    /// Index of `len` names; `Err((first, second))` with the positions of two entries of the same name.
    pub(crate) fn new<'a>(
        len: usize,
        name: impl Fn(usize) -> &'a str,
    ) -> Result<Self, (usize, usize)> {
        let mut sorted: Vec<u32> = (0..len as u32).collect();
        // Equal names go by position, so that the first duplicate in the file is the one reported as first.
        sorted.sort_unstable_by(|&a, &b| name(a as usize).cmp(name(b as usize)).then(a.cmp(&b)));
        match sorted
            .windows(2)
            .find(|pair| name(pair[0] as usize) == name(pair[1] as usize))
        {
            Some(pair) => Err((pair[0] as usize, pair[1] as usize)),
            None => Ok(NameIndex(sorted)),
        }
    }

    /// Position of the entry called `wanted`.
    pub(crate) fn find<'a>(&self, wanted: &str, name: impl Fn(usize) -> &'a str) -> Option<usize> {
        let found = self
            .0
            .binary_search_by(|&at| name(at as usize).cmp(wanted))
            .ok()?;
        Some(self.0[found] as usize)
    }
}
