//! The prompt of a model that was trained to write what is missing in the middle of a text. Decides in which order the parts stand, and what
//! of them is left out where the context is too small: what is farthest from the gap.

use std::sync::Arc;

use prima_text::{FillIn, TokenizerError};

use super::ModelText;
use super::openai_error::ApiError;

/// What stands around the gap.
#[derive(Default)]
pub struct Around<'a> {
    pub before: &'a str,
    pub after: &'a str,
    /// Pieces of other files, the most important last.
    pub others: Vec<FilePiece<'a>>,
}

/// A piece of a file.
pub struct FilePiece<'a> {
    pub name: &'a str,
    pub text: &'a str,
}

/// Bytes of a text for each token that are looked at where only a part of it may count: hardly a text has longer tokens.
const BYTES_PER_TOKEN: usize = 64;

/// The tokens of the prompt, at most `most`. `field` is what asks for it.
///
/// # Errors
/// The model was not trained for it.
pub fn prompt(
    text: &ModelText,
    around: &Around<'_>,
    most: usize,
    field: &str,
) -> Result<Arc<[u32]>, ApiError> {
    let marks = text.tokenizer.fill_in().ok_or_else(|| {
        let problem = format!(
            "{field} needs a model that was trained to fill in the middle; this one has no tokens for it"
        );
        ApiError::invalid(field, problem)
    })?;
    // The beginning of a text, where the model wants one.
    let mut tokens = text
        .tokenizer
        .encode("", true, false)
        .map_err(|error| unreadable(field, &error))?;
    // A text that ends with a token of its own would end before it is filled in.
    tokens.truncate(usize::from(text.tokenizer.bos() == tokens.first().copied()));
    let room = most.saturating_sub(tokens.len() + 3);
    // As in llama.cpp: three quarters for what is before. What one part leaves is the others'.
    let after = beginning(text, around.after, room, field)?;
    let before_room = room - after.len().min(room / 4);
    let before = end(text, around.before, before_room, field)?;
    let after = &after[..after.len().min(room - before.len())];
    let others_room = room - before.len() - after.len();
    tokens.extend(others(text, marks, &around.others, others_room, field)?);
    tokens.push(marks.before);
    tokens.extend(before);
    tokens.push(marks.after);
    tokens.extend(after);
    tokens.push(marks.between);
    Ok(tokens.into())
}

/// Pieces of other files in the form that models know them in, as many of the last ones as there is room for. Then comes the file itself.
fn others(
    text: &ModelText,
    marks: FillIn,
    pieces: &[FilePiece<'_>],
    room: usize,
    field: &str,
) -> Result<Vec<u32>, ApiError> {
    if pieces.is_empty() {
        return Ok(Vec::new());
    }
    let encode = |part: &str| beginning(text, part, room, field);
    let (head, tail) = match (marks.repository, marks.file) {
        (Some(repository), Some(file)) => (
            [vec![repository], encode("repository\n")?].concat(),
            [vec![file], encode("this file\n")?].concat(),
        ),
        _ => (Vec::new(), Vec::new()),
    };
    let mut left = room.saturating_sub(head.len() + tail.len());
    let mut kept = Vec::new();
    for FilePiece { name, text: piece } in pieces.iter().rev() {
        let tokens = match marks.file {
            Some(file) => [vec![file], encode(&format!("{name}\n{piece}"))?].concat(),
            None => encode(&format!("\n\n--- {name} ---\n\n{piece}"))?,
        };
        if tokens.len() > left {
            break;
        }
        left -= tokens.len();
        kept.push(tokens);
    }
    if kept.is_empty() {
        return Ok(Vec::new());
    }
    let kept = kept.into_iter().rev().flatten();
    Ok(head.into_iter().chain(kept).chain(tail).collect())
}

/// The first tokens of a text, at most `most`.
fn beginning(text: &ModelText, part: &str, most: usize, field: &str) -> Result<Vec<u32>, ApiError> {
    let bytes = part.floor_char_boundary(most.saturating_mul(BYTES_PER_TOKEN));
    let mut tokens = encode(text, &part[..bytes], field)?;
    tokens.truncate(most);
    Ok(tokens)
}

/// The last tokens of a text, at most `most`.
fn end(text: &ModelText, part: &str, most: usize, field: &str) -> Result<Vec<u32>, ApiError> {
    let bytes = most.saturating_mul(BYTES_PER_TOKEN).min(part.len());
    let from = part.ceil_char_boundary(part.len() - bytes);
    let tokens = encode(text, &part[from..], field)?;
    let from = tokens.len().saturating_sub(most);
    Ok(tokens[from..].to_vec())
}

fn encode(text: &ModelText, part: &str, field: &str) -> Result<Vec<u32>, ApiError> {
    // A token has at least a byte, and a text may get a space before it.
    let tokens = text
        .tokenizer
        .encode_at_most(part.len() + 1, part, false, false);
    tokens.map_err(|error| unreadable(field, &error))
}

fn unreadable(field: &str, error: &TokenizerError) -> ApiError {
    ApiError::invalid(field, error.to_string())
}
