//! How an error reads wherever people see it, in logs, on terminals and in the documents' messages: with its causes, in one line.

use std::error::Error;

use crate::printable::printable_lines;

/// `what failed: why: why that`. What strangers wrote may be a part of it, so it is printable.
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    printable_lines(&text)
}
