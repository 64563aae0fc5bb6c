//! Many short texts in one piece of memory: a vocabulary has some 600,000, and a piece for each would take several times their length.

/// The texts of an array, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Strings {
    text: String,
    /// Where each ends in `text`.
    ends: Vec<usize>,
}

impl Strings {
    pub(crate) fn with_capacity(count: usize) -> Strings {
        Strings {
            text: String::new(),
            ends: Vec::with_capacity(count),
        }
    }

    pub(crate) fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The texts, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let text = &self.text[start..end];
            start = end;
            text
        })
    }
}

impl<S: AsRef<str>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(texts: I) -> Strings {
        let mut strings = Strings::default();
        for text in texts {
            strings.push(text.as_ref());
        }
        strings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_come_back_in_order() {
        let texts = ["", "a", "", "é\0", "b c"];
        let strings: Strings = texts.iter().collect();
        assert_eq!(strings.len(), 5);
        assert!(strings.iter().eq(texts));
        assert_eq!(strings.iter().len(), 5);
        assert!(Strings::default().is_empty());
        assert_ne!(strings, ["", "a", "é\0", "", "b c"].iter().collect());
    }
}
