//! The parts that an answer is taken apart into, and how marks are found in a text that comes in pieces.
//!
//! Decides: which part of a text certainly comes before a mark, and what must wait since it could begin one.

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum AnswerPart {
    Content(String),
    Reasoning(String),
    /// A call begins.
    Call {
        name: String,
    },
    /// More of its arguments, which together are one JSON object.
    Arguments(String),
}

/// Takes what comes before the first of `marks` off the text, and the mark with it. Without one, what could begin one stays.
pub(crate) fn take_until<'m>(text: &mut String, marks: &[&'m str]) -> (String, Option<&'m str>) {
    let places = marks
        .iter()
        .filter_map(|mark| Some((text.find(mark)?, *mark)));
    // Of two at one place, the longer.
    let first = places.min_by_key(|(place, mark)| (*place, std::cmp::Reverse(mark.len())));
    if let Some((place, mark)) = first {
        let before = text[..place].to_owned();
        text.drain(..place + mark.len());
        return (before, Some(mark));
    }
    let certain = text.len() - unfinished(text, marks);
    (text.drain(..certain).collect(), None)
}

/// Bytes at the end of `text` that could begin one of `marks`; the longest beginning counts.
pub fn unfinished(text: &str, marks: &[impl AsRef<str>]) -> usize {
    let beginning_of = |mark: &str| {
        let longest = text.len().min(mark.len().saturating_sub(1));
        (1..=longest)
            .rev()
            .find(|&length| text.as_bytes().ends_with(&mark.as_bytes()[..length]))
            .unwrap_or(0)
    };
    // Marks are UTF-8, so such a beginning starts at a character.
    marks
        .iter()
        .map(|mark| beginning_of(mark.as_ref()))
        .max()
        .unwrap_or(0)
}

/// Neighbours of one kind as one part.
pub(crate) fn join(parts: Vec<AnswerPart>) -> Vec<AnswerPart> {
    let mut joined: Vec<AnswerPart> = Vec::with_capacity(parts.len());
    for part in parts {
        match (joined.last_mut(), &part) {
            (Some(AnswerPart::Content(text)), AnswerPart::Content(more))
            | (Some(AnswerPart::Reasoning(text)), AnswerPart::Reasoning(more))
            | (Some(AnswerPart::Arguments(text)), AnswerPart::Arguments(more)) => {
                text.push_str(more)
            }
            (
                _,
                AnswerPart::Content(text)
                | AnswerPart::Reasoning(text)
                | AnswerPart::Arguments(text),
            ) if text.is_empty() => {}
            _ => joined.push(part),
        }
    }
    joined
}
