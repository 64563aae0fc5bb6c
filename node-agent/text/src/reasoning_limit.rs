//! A bound on how many tokens a model reasons: after so many of them, it is made to close its reasoning in its family's way, and answers.
//!
//! Decides: which tokens of an answer are reasoning, and what must come when there were enough. A character of several tokens is whole
//! before that, so there may be three tokens more. Refuses nothing: if a grammar does not allow the closing mark where it is due, the grammar counts, and the mark comes as soon as it may.

use std::sync::Arc;

use crate::answer_form::{AnswerForm, Marks, Reasoning};
use crate::answer_part::take_until;
use crate::detokenizer::Detokenizer;
use crate::tokenizer::Tokenizer;
use crate::tokenizer_error::TokenizerError;

/// How far one answer has come in its reasoning.
#[derive(Debug, Clone)]
pub struct ReasoningLimit {
    marks: Marks,
    detokenizer: Detokenizer,
    /// What could begin the mark that is looked for.
    held: String,
    reasons: bool,
    /// Tokens of reasoning that may still come.
    left: usize,
    /// Tokens beyond these, for a character that is not whole.
    patience: usize,
    /// What closes reasoning.
    closing: Arc<[u32]>,
    /// How much of it has come, while it does.
    closed: Option<usize>,
}

/// Bytes, and so tokens.
const LONGEST_CHARACTER: usize = 4;

impl ReasoningLimit {
    /// At most `tokens` in an answer. `may_call`: the answer may be a call of a tool. `None`: the family does not reason.
    ///
    /// # Errors
    /// The vocabulary cannot spell the closing mark.
    pub fn new(
        tokens: usize,
        form: &AnswerForm,
        reasoning: Reasoning,
        may_call: bool,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Self>, TokenizerError> {
        let Some(marks) = form.reasoning else {
            return Ok(None);
        };
        let closing = tokenizer.encode(&form.closing(may_call), false, true)?;
        let shown = form.control_tokens(false, tokenizer);
        let mut limit = Self {
            marks,
            detokenizer: Detokenizer::new(tokenizer).showing(shown),
            held: String::new(),
            reasons: reasoning == Reasoning::Open,
            left: tokens,
            patience: LONGEST_CHARACTER - 1,
            closing: closing.into(),
            closed: None,
        };
        limit.close_if_due();
        Ok(Some(limit))
    }

    /// The token that must come next.
    pub(crate) fn due(&self) -> Option<u32> {
        self.closing.get(self.closed?).copied()
    }

    /// Tells that `token` comes next.
    pub(crate) fn accept(&mut self, token: u32) {
        let as_due = self.due() == Some(token);
        self.closed = self
            .closed
            .filter(|_| as_due)
            .map(|closed| closed + 1)
            .filter(|closed| *closed < self.closing.len());
        let reasoned = self.reasons;
        self.held += &self.detokenizer.push(token);
        loop {
            let mark = match self.reasons {
                true => self.marks.close,
                false => self.marks.open,
            };
            let (_, found) = take_until(&mut self.held, &[mark]);
            if found.is_none() {
                break;
            }
            self.reasons = !self.reasons;
        }
        // Neither mark is reasoning.
        if reasoned && self.reasons && !as_due {
            self.left = self.left.saturating_sub(1);
        }
        self.close_if_due();
    }

    fn close_if_due(&mut self) {
        if !self.reasons || self.left > 0 || self.closed.is_some() {
            return;
        }
        if self.detokenizer.holds_back() && self.patience > 0 {
            self.patience -= 1;
            return;
        }
        self.closed = Some(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channels::{self, MARKS};
    use crate::grammar::{Grammar, GrammarReader};
    use crate::sampler::Sampler;
    use crate::sampling_params::SamplingParams;
    use crate::test_vocabulary::signs_and;

    /// The first tokens of a model that always likes what comes next in `wished` best.
    fn written(
        (template, reasoning): (&str, Reasoning),
        tokens: usize,
        wished: &str,
        regex: Option<&str>,
    ) -> String {
        let tokenizer = tokenizer();
        let form = AnswerForm::of_template(template);
        let limit = ReasoningLimit::new(tokens, &form, reasoning, false, &tokenizer).unwrap();
        let greedy = SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        };
        let mut sampler = Sampler::new(greedy).unwrap();
        sampler.limit_reasoning(limit);
        let grammars = GrammarReader::new(&tokenizer).unwrap();
        sampler.constrain(regex.map(|regex| grammars.read(Grammar::Regex(regex.into())).unwrap()));
        let mut bytes = Vec::new();
        let wished = tokenizer.encode(wished, false, true).unwrap();
        let mut wished = wished.into_iter().peekable();
        while let Some(wish) = wished.peek().copied() {
            let mut logits = vec![0.0; tokenizer.vocab_size()];
            logits[wish as usize] = 9.0;
            let token = sampler.sample(&logits, None).unwrap().token;
            sampler.accept(token).unwrap();
            wished.next_if_eq(&token);
            match tokenizer.control_text(token) {
                Some(name) => bytes.extend_from_slice(name.as_bytes()),
                None => bytes.extend_from_slice(&tokenizer.token_bytes(token)),
            }
        }
        String::from_utf8(bytes).unwrap()
    }

    fn tokenizer() -> Tokenizer {
        signs_and(["<think>", "</think>"].iter().chain(&MARKS))
    }

    const OPENED: (&str, Reasoning) = ("<think>\\n\\n</think>\\n\\n", Reasoning::Open);
    const POSSIBLE: (&str, Reasoning) = ("<think></think>", Reasoning::Possible);
    const CHANNELS: (&str, Reasoning) = (channels::ANALYSIS, Reasoning::Possible);

    #[test]
    fn reasoning_is_closed_after_so_many_tokens() {
        for (family, tokens, wished, expected) in [
            (OPENED, 0, "yes", "\n</think>\n\nyes"),
            (OPENED, 2, "hmyes", "hm\n</think>\n\nyes"),
            (POSSIBLE, 2, "<think>hmyes", "<think>hm</think>yes"),
            (POSSIBLE, 0, "<think>yes", "<think></think>yes"),
            // Within a character of three bytes, which are tokens here.
            (OPENED, 2, "h\u{20ac}yes", "h\u{20ac}\n</think>\n\nyes"),
            (OPENED, 1, "\u{1f980}yes", "\u{1f980}\n</think>\n\nyes"),
            // Two times, of which the second is too long.
            (
                POSSIBLE,
                3,
                "<think>hm</think>y<think>hmes",
                "<think>hm</think>y<think>h</think>mes",
            ),
            (
                CHANNELS,
                2,
                "<|channel|>analysis<|message|>hmyes",
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
            ),
        ] {
            assert_eq!(written(family, tokens, wished, None), expected);
        }
    }

    #[test]
    fn shorter_reasoning_and_none_at_all_are_left_alone() {
        for (family, answer) in [
            (OPENED, "hm</think>yes"),
            (POSSIBLE, "yesyesyesyes"),
            (POSSIBLE, "<think>hm</think>yesyes"),
            (CHANNELS, "<|channel|>final<|message|>yesyesyes"),
        ] {
            assert_eq!(written(family, 3, answer, None), answer);
        }
    }

    #[test]
    fn a_grammar_that_knows_no_mark_counts() {
        assert_eq!(written(OPENED, 1, "yes", Some("yes")), "yes");
    }
}
