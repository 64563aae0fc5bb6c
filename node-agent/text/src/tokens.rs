//! The tokens of a text while they are found: a list that ends the search when there are more than were asked for.

use crate::tokenizer_error::TokenizerError;

/// At most `limit` tokens.
#[derive(Debug)]
pub(crate) struct Tokens {
    ids: Vec<u32>,
    limit: usize,
}

impl Tokens {
    pub(crate) fn at_most(limit: usize) -> Self {
        Self {
            ids: Vec::new(),
            limit,
        }
    }

    pub(crate) fn push(&mut self, token: u32) -> Result<(), TokenizerError> {
        if self.ids.len() == self.limit {
            return Err(TokenizerError::TooLong { limit: self.limit });
        }
        self.ids.push(token);
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Forgets all but the first `len`.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
    }

    pub(crate) fn into_ids(self) -> Vec<u32> {
        self.ids
    }
}
