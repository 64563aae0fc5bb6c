//! Grammars in llama.cpp's form (GBNF, llama.cpp `grammars/README.md`), written again in Lark's.
//!
//! Decides: which rules become terminals: all that need no recursion, since what is one terminal is matched exactly. Refuses: what is not
//! GBNF (the error names the line), and rules that are missing.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;
use std::str::Chars;

use crate::grammar_error::GrammarError;

/// One piece of a rule's right side.
#[derive(Debug, PartialEq)]
enum Piece {
    Literal(String),
    /// A character class, as a regular expression has it, with its brackets.
    Class(String),
    Rule(String),
    /// `( ) |` and repetitions: the same in both forms.
    Same(String),
}

type Rules = BTreeMap<String, Vec<Piece>>;

/// The same grammar for llguidance.
pub(crate) fn to_lark(grammar: &str) -> Result<String, GrammarError> {
    let rules = Reader::new(grammar).rules()?;
    if !rules.contains_key("root") {
        return Err(wrong("the grammar has no rule `root`".to_owned()));
    }
    let names: BTreeSet<&String> = rules.keys().collect();
    let used = rules.values().flatten().filter_map(name_of);
    if let Some(missing) = used.into_iter().find(|name| !names.contains(name)) {
        return Err(wrong(format!(
            "the grammar uses the rule `{missing}`, but has none of this name"
        )));
    }
    let regular = regular(&rules);
    let numbers: BTreeMap<&String, usize> = rules.keys().zip(0..).collect();
    // Lark takes capitals for terminals.
    let lark_name = |name: &String| match regular.contains(name) {
        true => format!("T{}", numbers[name]),
        false => format!("r{}", numbers[name]),
    };
    let root = "root".to_owned();
    let mut lark = format!("start: {}\n", lark_name(&root));
    for (name, pieces) in &rules {
        let right: Vec<String> = pieces
            .iter()
            .map(|piece| match piece {
                Piece::Literal(text) => serde_json::Value::from(text.as_str()).to_string(),
                Piece::Class(class) => format!("/{class}/"),
                Piece::Rule(name) => lark_name(name),
                Piece::Same(same) => same.clone(),
            })
            .collect();
        lark += &format!("{}: {}\n", lark_name(name), right.join(" "));
    }
    Ok(lark)
}

fn name_of(piece: &Piece) -> Option<&String> {
    match piece {
        Piece::Rule(name) => Some(name),
        _ => None,
    }
}

/// The rules that are no part of a circle and lead to none.
fn regular(rules: &Rules) -> BTreeSet<&String> {
    let mut regular = BTreeSet::new();
    loop {
        let before = regular.len();
        for (name, pieces) in rules {
            if pieces
                .iter()
                .filter_map(name_of)
                .all(|used| regular.contains(used))
            {
                regular.insert(name);
            }
        }
        if regular.len() == before {
            return regular;
        }
    }
}

fn wrong(problem: String) -> GrammarError {
    GrammarError::Grammar { problem }
}

struct Reader<'g> {
    rest: Peekable<Chars<'g>>,
    line: usize,
}

impl<'g> Reader<'g> {
    fn new(grammar: &'g str) -> Self {
        Self {
            rest: grammar.chars().peekable(),
            line: 1,
        }
    }

    fn rules(mut self) -> Result<Rules, GrammarError> {
        let mut rules = Rules::new();
        loop {
            self.skip_space(true);
            if self.rest.peek().is_none() {
                return Ok(rules);
            }
            let name = self.name();
            self.skip_space(true);
            for expected in "::=".chars() {
                if self.next() != Some(expected) {
                    return Err(self.wrong("expected `name ::= ...`"));
                }
            }
            self.skip_space(true);
            let pieces = self.pieces()?;
            if rules.insert(name.clone(), pieces).is_some() {
                return Err(self.wrong(&format!("the rule `{name}` is there twice")));
            }
        }
    }

    /// Up to the end of the line, or of the last line where a parenthesis is open or an alternative follows.
    fn pieces(&mut self) -> Result<Vec<Piece>, GrammarError> {
        let (mut pieces, mut open) = (Vec::new(), 0usize);
        loop {
            let after_bar = pieces.last() == Some(&Piece::Same("|".to_owned()));
            self.skip_space(open > 0 || after_bar);
            match self.rest.peek().copied() {
                None | Some('\n') if open > 0 => return Err(self.wrong("a `(` is not closed")),
                None | Some('\n') => return Ok(pieces),
                Some('"') => pieces.push(Piece::Literal(self.literal()?)),
                Some('[') => pieces.push(Piece::Class(self.class()?)),
                Some('.') => {
                    self.next();
                    pieces.push(Piece::Class(r"[\s\S]".to_owned()));
                }
                Some('{') => pieces.push(Piece::Same(self.until('}')?)),
                Some(sign @ ('(' | ')' | '|' | '*' | '+' | '?')) => {
                    self.next();
                    open = match sign {
                        '(' => open + 1,
                        ')' => open
                            .checked_sub(1)
                            .ok_or_else(|| self.wrong("a `)` too many"))?,
                        _ => open,
                    };
                    pieces.push(Piece::Same(sign.to_string()));
                }
                Some(first) if is_of_name(first) => pieces.push(Piece::Rule(self.name())),
                Some(other) => return Err(self.wrong(&format!("`{other}` is not understood"))),
            }
        }
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some(next) = self.rest.next_if(|next| is_of_name(*next)) {
            name.push(next);
        }
        name
    }

    fn literal(&mut self) -> Result<String, GrammarError> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                Some('"') => return Ok(text),
                Some('\\') => text.push(self.escaped()?),
                Some('\n') | None => return Err(self.wrong("a text is not closed")),
                Some(other) => text.push(other),
            }
        }
    }

    fn class(&mut self) -> Result<String, GrammarError> {
        self.next();
        let mut class = "[".to_owned();
        if self.rest.next_if_eq(&'^').is_some() {
            class.push('^');
        }
        loop {
            match self.next() {
                Some(']') => break,
                // Ranges are the same in both.
                Some('-') => class.push('-'),
                Some('\\') => {
                    let escaped = self.escaped()?;
                    class += &in_class(escaped);
                }
                Some('\n') | None => return Err(self.wrong("a `[` is not closed")),
                Some(other) => class += &in_class(other),
            }
        }
        class.push(']');
        Ok(class)
    }

    /// What follows a backslash.
    fn escaped(&mut self) -> Result<char, GrammarError> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(other) if other.is_ascii_punctuation() => return Ok(other),
            _ => return Err(self.wrong("a `\\` with something that needs none")),
        };
        let code: String = (0..digits).filter_map(|_| self.next()).collect();
        let character = u32::from_str_radix(&code, 16).ok().and_then(char::from_u32);
        character.ok_or_else(|| self.wrong(&format!("`{code}` is no character's number")))
    }

    fn until(&mut self, end: char) -> Result<String, GrammarError> {
        let mut text = String::new();
        loop {
            match self.next() {
                None => return Err(self.wrong(&format!("a `{end}` is missing"))),
                Some(next) => text.push(next),
            }
            if text.ends_with(end) {
                return Ok(text);
            }
        }
    }

    fn skip_space(&mut self, lines: bool) {
        while let Some(&next) = self.rest.peek() {
            match next {
                '#' => while self.rest.next_if(|next| *next != '\n').is_some() {},
                '\n' if !lines => return,
                _ if next.is_whitespace() => {
                    self.next();
                }
                _ => return,
            }
        }
    }

    fn next(&mut self) -> Option<char> {
        let next = self.rest.next();
        self.line += usize::from(next == Some('\n'));
        next
    }

    fn wrong(&self, problem: &str) -> GrammarError {
        wrong(format!("line {} of the grammar: {problem}", self.line))
    }
}

fn is_of_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '-' || character == '_'
}

/// A character of a class, such that it stands for itself in a regular expression between slashes.
fn in_class(character: char) -> String {
    match character {
        '\n' => r"\n".to_owned(),
        '\r' => r"\r".to_owned(),
        '\t' => r"\t".to_owned(),
        _ if character.is_ascii_punctuation() => format!("\\{character}"),
        _ if character.is_control() => format!("\\x{{{:x}}}", u32::from(character)),
        _ => character.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_terminals_unless_they_need_themselves() {
        let lark = to_lark("root ::= list # all\nlist ::= \"[\" (item (\",\" item)*)? \"]\"\nitem ::= [0-9]{1,3} | list\n").unwrap();
        let expected =
            "start: r2\nr0: /[0-9]/ {1,3} | r1\nr1: \"[\" ( r0 ( \",\" r0 ) * ) ? \"]\"\nr2: r1\n";
        assert_eq!(lark, expected);
        let lark = to_lark("root ::= word \"!\"\nword ::= [^\\]a\\n/-]+").unwrap();
        assert_eq!(lark, "start: T0\nT0: T1 \"!\"\nT1: /[^\\]a\\n\\/-]/ +\n");
    }

    #[test]
    fn what_is_no_grammar_is_refused_with_its_line() {
        for (grammar, says) in [
            ("", "no rule `root`"),
            ("root ::= a", "the rule `a`"),
            ("root ::= \"a", "line 1"),
            ("root ::= \"a\"\n\nb = c", "line 3"),
            ("root ::= (\"a\"", "not closed"),
            ("root ::= \"a\")", "too many"),
            ("root ::= [a", "not closed"),
            ("root ::= \"\\xzz\"", "number"),
            ("root ::= \"a\"\nroot ::= \"b\"", "twice"),
            ("root ::= %", "`%`"),
        ] {
            let error = to_lark(grammar).expect_err(grammar).to_string();
            assert!(error.contains(says), "{grammar}: {error}");
        }
    }
}
