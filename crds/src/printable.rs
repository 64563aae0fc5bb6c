//! Texts of strangers, as people may see them: a terminal obeys control characters, which could clear what it shows, or write over it.

/// `text` in one line, with U+FFFD in the place of each control character.
pub fn printable(text: &str) -> String {
    text.chars().map(shown).collect()
}

/// The same, with its line breaks and tabs.
pub(crate) fn printable_lines(text: &str) -> String {
    let characters = text.chars().map(|c| match c {
        '\n' | '\t' => c,
        c => shown(c),
    });
    characters.collect()
}

fn shown(c: char) -> char {
    match c.is_control() {
        true => char::REPLACEMENT_CHARACTER,
        false => c,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_obeys_nothing_of_it() {
        let text = "\u{1b}]0;x\u{7}Grüße\u{9b}2J\r\n\tß";
        assert_eq!(
            printable(text),
            "\u{fffd}]0;x\u{fffd}Grüße\u{fffd}2J\u{fffd}\u{fffd}\u{fffd}ß"
        );
        assert_eq!(
            printable_lines(text),
            "\u{fffd}]0;x\u{fffd}Grüße\u{fffd}2J\u{fffd}\n\tß"
        );
    }
}
