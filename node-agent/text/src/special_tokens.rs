//! Where a text holds special tokens: these are cut out before the text between them is tokenized.
//!
//! Decides, as llama.cpp does: all occurrences of the longest token are cut out first, then those of the next longest in what is left, and
//! so on. The text is searched for all of them at once, since some vocabularies have thousands. Knows nothing of the text between them.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

use aho_corasick::{AhoCorasick, Match};
use prima_gguf::Metadata;

use crate::tokenizer_error::TokenizerError;
use crate::vocabulary::{TokenKind, Vocabulary};

/// A vocabulary's special tokens.
#[derive(Debug)]
pub(crate) struct SpecialTokens {
    /// The longest first.
    tokens: Vec<Special>,
    /// Finds them in a text. Its patterns are numbered as `tokens` are.
    finder: AhoCorasick,
}

#[derive(Debug)]
struct Special {
    token: u32,
    text: String,
    /// Found only where the caller asks for it: control tokens, and the unknown token.
    on_request: bool,
    /// White space after it belongs to it.
    strips_right: bool,
}

/// A text, taken apart: special tokens, and what is between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fragment<'t> {
    Token(u32),
    Text(&'t str),
}

/// A part of a text: a token, or text in which shorter tokens are still looked for.
type Part = (Option<u32>, Range<usize>);

impl SpecialTokens {
    pub(crate) fn of(metadata: &Metadata, vocabulary: &Vocabulary) -> Result<Self, TokenizerError> {
        // GGUF has no field for which tokens strip white space; llama.cpp knows Phi-3 by the model's name.
        let model = metadata.str("general.name")?.unwrap_or_default();
        let model = model.to_ascii_lowercase();
        let is_phi3 = model.contains("phi-3") || model.contains("phi3");
        let tokens = vocabulary.iter().filter_map(|(token, text, kind)| {
            let on_request = match kind {
                TokenKind::UserDefined => false,
                TokenKind::Control | TokenKind::Unknown => true,
                TokenKind::Normal | TokenKind::Unused | TokenKind::Byte(_) => return None,
            };
            Some(Special {
                token,
                text: text.to_owned(),
                on_request,
                strips_right: is_phi3 && !matches!(text, "<unk>" | "<s>" | "<|endoftext|>"),
            })
        });
        Self::new(tokens.collect())
    }

    /// `tokens` have different texts, and none is empty.
    fn new(mut tokens: Vec<Special>) -> Result<Self, TokenizerError> {
        tokens.sort_by_key(|special| Reverse(special.text.len()));
        let finder = AhoCorasick::new(tokens.iter().map(|special| &special.text))
            .map_err(|source| TokenizerError::SpecialTokens { source })?;
        Ok(Self { tokens, finder })
    }

    /// Whether white space behind a special token may belong to it, however much there is.
    pub(crate) fn strip_white_space(&self) -> bool {
        self.tokens.iter().any(|special| special.strips_right)
    }

    /// Takes `text` apart. With `parse_special`, control tokens are found, too. The error is that there are more than `limit` tokens; it is
    /// given before the memory for many more is taken, but not for every such text.
    pub(crate) fn cut_out_of<'t>(
        &self,
        text: &'t str,
        parse_special: bool,
        limit: usize,
    ) -> Result<Vec<Fragment<'t>>, TokenizerError> {
        let mut fragments = Vec::new();
        let mut rest = 0;
        for cluster in self.clusters(text, parse_special, limit)? {
            for (token, range) in self.cut_cluster(text, cluster, parse_special, limit)? {
                if rest < range.start {
                    fragments.push(Fragment::Text(&text[rest..range.start]));
                }
                fragments.push(Fragment::Token(token));
                rest = range.end;
            }
            refuse_more_than(limit, fragments.len())?;
        }
        if rest < text.len() {
            fragments.push(Fragment::Text(&text[rest..]));
        }
        Ok(fragments)
    }

    /// The ranges of `text` that tokens occur in, in order. No occurrence reaches out of its range, so what is cut out of one range does
    /// not depend on the others.
    fn clusters(
        &self,
        text: &str,
        parse_special: bool,
        limit: usize,
    ) -> Result<Vec<Range<usize>>, TokenizerError> {
        let longest = self.tokens.first().map_or(0, |special| special.text.len());
        let mut clusters: Vec<Range<usize>> = Vec::new();
        for (special, found) in self.occurrences(text, parse_special) {
            let mut cluster = found.start()..special.end(text, found.end()..text.len());
            // Occurrences come in the order of their ends, so this one may begin before several others.
            while let Some(last) = clusters.pop_if(|last| cluster.start < last.end) {
                cluster = last.start.min(cluster.start)..last.end.max(cluster.end);
            }
            clusters.push(cluster);
            // Each gives a token. Only those that the longest token reaches back to may still become one.
            if clusters.len() > limit.saturating_add(longest + 1) {
                return Err(TokenizerError::TooLong { limit });
            }
        }
        Ok(clusters)
    }

    /// The tokens that are cut out of a cluster, in order, each with its range.
    fn cut_cluster(
        &self,
        text: &str,
        cluster: Range<usize>,
        parse_special: bool,
        limit: usize,
    ) -> Result<impl Iterator<Item = (u32, Range<usize>)>, TokenizerError> {
        let occurrences = self.occurrences(&text[cluster.clone()], parse_special);
        let longest_first: BTreeSet<_> = occurrences.map(|(_, found)| found.pattern()).collect();
        let mut parts: Vec<Part> = vec![(None, cluster)];
        for pattern in longest_first {
            let mut cut = Vec::with_capacity(parts.len() + 2);
            for (token, range) in parts {
                match token {
                    Some(_) => cut.push((token, range)),
                    None => self.tokens[pattern].cut_out_of(text, range, limit, &mut cut)?,
                }
            }
            parts = cut;
        }
        let tokens = parts.into_iter();
        Ok(tokens.filter_map(|(token, range)| Some((token?, range))))
    }

    /// Wherever a token is in `text`, also within others, in the order of their ends.
    fn occurrences(
        &self,
        text: &str,
        parse_special: bool,
    ) -> impl Iterator<Item = (&Special, Match)> {
        let found = self.finder.find_overlapping_iter(text);
        let found = found.map(|found| (&self.tokens[found.pattern()], found));
        found.filter(move |(special, _)| parse_special || !special.on_request)
    }
}

impl Special {
    /// Appends the parts of `range` to `parts`: this token, as often as it is there, and the texts between.
    fn cut_out_of(
        &self,
        text: &str,
        mut range: Range<usize>,
        limit: usize,
        parts: &mut Vec<Part>,
    ) -> Result<(), TokenizerError> {
        while let Some(before) = text[range.clone()].find(&self.text) {
            let start = range.start + before;
            if range.start < start {
                parts.push((None, range.start..start));
            }
            range.start = self.end(text, start + self.text.len()..range.end);
            parts.push((Some(self.token), start..range.start));
            refuse_more_than(limit, parts.len())?;
        }
        if !range.is_empty() {
            parts.push((None, range));
        }
        Ok(())
    }

    /// Where an occurrence ends that `behind` comes after: there, or where its white space ends.
    fn end(&self, text: &str, behind: Range<usize>) -> usize {
        match self.strips_right {
            true => behind.end - text[behind].trim_start_matches(is_c_space).len(),
            false => behind.start,
        }
    }
}

/// Refuses `parts` of a text that hold more than `limit` tokens for certain: no two texts follow one another.
fn refuse_more_than(limit: usize, parts: usize) -> Result<(), TokenizerError> {
    if parts / 2 > limit {
        return Err(TokenizerError::TooLong { limit });
    }
    Ok(())
}

/// What C's `isspace` takes for white space.
fn is_c_space(character: char) -> bool {
    matches!(character, ' ' | '\t' | '\n' | '\u{B}' | '\u{C}' | '\r')
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    use super::*;

    /// What [`SpecialTokens::cut_out_of`] means, one token after the other.
    fn one_after_the_other<'t>(
        special: &SpecialTokens,
        text: &'t str,
        parse_special: bool,
    ) -> Vec<Fragment<'t>> {
        let searched = |special: &&Special| parse_special || !special.on_request;
        let mut tokens: Vec<&Special> = special.tokens.iter().filter(searched).collect();
        tokens.sort_by_key(|special| (Reverse(special.text.len()), special.token));
        let mut fragments = vec![Fragment::Text(text)];
        for special in tokens {
            let mut cut = Vec::new();
            for fragment in fragments {
                let Fragment::Text(mut rest) = fragment else {
                    cut.push(fragment);
                    continue;
                };
                while let Some((before, after)) = rest.split_once(&special.text) {
                    cut.push(Fragment::Text(before));
                    cut.push(Fragment::Token(special.token));
                    rest = match special.strips_right {
                        true => after.trim_start_matches(is_c_space),
                        false => after,
                    };
                }
                cut.push(Fragment::Text(rest));
            }
            fragments = cut;
        }
        fragments.retain(|fragment| *fragment != Fragment::Text(""));
        fragments
    }

    /// Of few characters, two of which begin with the same byte, so that tokens overlap in every way.
    fn text(characters: Range<usize>) -> impl Strategy<Value = String> {
        let character = prop::sample::select(vec!['a', 'b', '\n', 'é', 'è']);
        vec(character, characters).prop_map(String::from_iter)
    }

    fn special_tokens() -> impl Strategy<Value = SpecialTokens> {
        let tokens = btree_map(text(1..6), (any::<bool>(), any::<bool>()), 0..8);
        // Of those of one length, the first is cut out first.
        let tokens = tokens.prop_map(|tokens| tokens.into_iter().collect::<Vec<_>>());
        tokens.prop_shuffle().prop_map(|tokens| {
            let tokens = (0..).zip(tokens);
            let tokens = tokens.map(|(token, (text, (on_request, strips_right)))| Special {
                token,
                text,
                on_request,
                strips_right,
            });
            SpecialTokens::new(tokens.collect()).unwrap()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn tokens_are_cut_out_as_if_one_after_the_other(
            special in special_tokens(),
            text in text(0..40),
            parse_special in any::<bool>(),
            limit in 0..20_usize,
        ) {
            let expected = one_after_the_other(&special, &text, parse_special);
            let is_token = |fragment: &&Fragment| matches!(fragment, Fragment::Token(_));
            let tokens = expected.iter().filter(is_token).count();
            for limit in [usize::MAX, tokens] {
                let found = special.cut_out_of(&text, parse_special, limit).unwrap();
                prop_assert_eq!(&found, &expected);
            }
            match special.cut_out_of(&text, parse_special, limit) {
                Ok(found) => {
                    prop_assert!(found.len() <= 2 * limit + 2, "{} for {limit}", found.len());
                    prop_assert_eq!(found, expected);
                }
                Err(error) => {
                    prop_assert_eq!(error.to_string(), format!("the text has more than {limit} tokens"));
                    prop_assert!(tokens > limit);
                }
            }
        }
    }
}
