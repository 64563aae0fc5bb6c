//! Pre-tokenizers: how a text is cut into the words within which byte-pair encoding merges.
//!
//! Decides: the words, exactly as llama.cpp cuts them for the names in [`KNOWN`], but for those that go by the case of letters ([`Words::Gpt4o`],
//! [`Words::Tekken`], [`Words::Kimi`]): llama.cpp's patterns have every letter beyond ASCII in both cases, and it cuts nothing within a word
//! for Kimi; these are the published ones. Refuses: any
//! other name, and the name `default`, which in llama.cpp stands for "the converter did not know".
//!
//! The patterns are those of the models' published tokenizers, as llama.cpp reads them, with one change. They end in `\s+(?!\S)|\s+`,
//! but a look-ahead needs a backtracking engine, which hostile text can keep busy or make give up. Here `\s+` and [`Step::cut`] do
//! the same, in time linear in the text.
//!
//! Letters, numbers and punctuation are Unicode 16's, llama.cpp's are Unicode 15's: they differ in the 4,395 characters that were not
//! assigned before, and in no other.

use regex::Regex;

use crate::tokenizer_error::TokenizerError;

/// A pre-tokenizer, and what else its name says about a tokenizer.
#[derive(Debug)]
pub(crate) struct PreTokenizer {
    steps: Vec<Step>,
    /// Whether a word that is itself a token is taken as it is, without merging its bytes.
    pub(crate) ignore_merges: bool,
    /// Whether prompts begin with BOS unless the metadata says otherwise.
    pub(crate) add_bos: bool,
}

impl PreTokenizer {
    /// The one that `tokenizer.ggml.pre` names.
    pub(crate) fn from_name(name: &str) -> Result<Self, TokenizerError> {
        let Some(known) = KNOWN.iter().find(|known| known.name == name) else {
            return Err(TokenizerError::UnknownPreTokenizer {
                found: name.to_owned(),
                known: known_names(),
            });
        };
        let mut steps = Vec::new();
        for (cut, pattern) in known.words.steps() {
            let regex = Regex::new(pattern).map_err(|source| TokenizerError::Pattern {
                pre_tokenizer: name.to_owned(),
                source,
            })?;
            steps.push(Step { cut: *cut, regex });
        }
        Ok(Self {
            steps,
            ignore_merges: known.ignore_merges,
            add_bos: known.add_bos,
        })
    }

    /// Hands the words of `text`, which put together are `text`, to `take`, until it fails.
    pub(crate) fn each_word<'t, E>(
        &self,
        text: &'t str,
        take: &mut dyn FnMut(&'t str) -> Result<(), E>,
    ) -> Result<(), E> {
        cut(&self.steps, text, take)
    }
}

/// Has each step cut what the one before left.
fn cut<'t, E>(
    steps: &[Step],
    text: &'t str,
    take: &mut dyn FnMut(&'t str) -> Result<(), E>,
) -> Result<(), E> {
    match steps.split_first() {
        _ if text.is_empty() => Ok(()),
        None => take(text),
        Some((step, others)) => step.cut(text, &mut |word| cut(others, word, take)),
    }
}

/// The names that are known, for errors.
pub(crate) fn known_names() -> String {
    KNOWN.map(|known| known.name).join(", ")
}

/// What a name stands for.
#[derive(Clone, Copy)]
struct Known {
    name: &'static str,
    words: Words,
    ignore_merges: bool,
    add_bos: bool,
}

impl Known {
    const fn new(name: &'static str, words: Words) -> Self {
        Self {
            name,
            words,
            ignore_merges: false,
            add_bos: false,
        }
    }

    const fn ignoring_merges(self) -> Self {
        Self {
            ignore_merges: true,
            ..self
        }
    }

    const fn with_bos(self) -> Self {
        Self {
            add_bos: true,
            ..self
        }
    }
}

const fn llama3(name: &'static str) -> Known {
    Known::new(name, Words::Llama3).ignoring_merges().with_bos()
}

const KNOWN: [Known; 47] = [
    llama3("llama-bpe"),
    llama3("llama3"),
    llama3("llama-v3"),
    llama3("falcon3"),
    llama3("pixtral"),
    llama3("lfm2"),
    llama3("midm-2.0"),
    Known::new("dbrx", Words::Llama3),
    Known::new("smaug-bpe", Words::Llama3),
    Known::new("chatglm-bpe", Words::Llama3),
    Known::new("glm4", Words::Llama3).ignoring_merges(),
    Known::new("glm5", Words::Llama3).ignoring_merges(),
    Known::new("qwen2", Words::Qwen2),
    Known::new("deepseek-r1-qwen", Words::Qwen2),
    Known::new("stablelm2", Words::Qwen2),
    Known::new("megrez", Words::Qwen2),
    Known::new("hunyuan", Words::Qwen2),
    Known::new("kormo", Words::Qwen2),
    Known::new("f2llmv2", Words::Qwen2),
    Known::new("qwen35", Words::Qwen35),
    Known::new("gpt-4o", Words::Gpt4o),
    Known::new("llama4", Words::Gpt4o),
    Known::new("minimax-m2", Words::Gpt4o),
    Known::new("kanana2", Words::Gpt4o),
    Known::new("tekken", Words::Tekken)
        .ignoring_merges()
        .with_bos(),
    Known::new("smollm", Words::SmolLm),
    Known::new("command-r", Words::SmolLm),
    Known::new("refact", Words::SmolLm),
    Known::new("starcoder", Words::SmolLm),
    Known::new("codeshell", Words::SmolLm),
    Known::new("exaone", Words::SmolLm),
    Known::new("minerva-7b", Words::SmolLm),
    Known::new("gpt-2", Words::Gpt2),
    Known::new("phi-2", Words::Gpt2),
    Known::new("mpt", Words::Gpt2),
    Known::new("olmo", Words::Gpt2),
    Known::new("exaone4", Words::Gpt2),
    Known::new("granite-docling", Words::Gpt2),
    Known::new("trillion", Words::Gpt2),
    Known::new("mellum", Words::Gpt2),
    Known::new("a.x-4.0", Words::Gpt2),
    Known::new("gigachat", Words::Gpt2),
    Known::new("falcon", Words::Falcon),
    Known::new("deepseek-llm", Words::DeepSeekLlm),
    Known::new("deepseek-coder", Words::DeepSeekCoder),
    Known::new("deepseek-v3", Words::DeepSeekV3),
    Known::new("kimi-k2", Words::Kimi),
];

/// The patterns by which words are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Words {
    Llama3,
    Qwen2,
    Qwen35,
    Gpt4o,
    Tekken,
    SmolLm,
    Gpt2,
    Falcon,
    DeepSeekLlm,
    DeepSeekCoder,
    DeepSeekV3,
    Kimi,
}

impl Words {
    /// The steps, in order; each one works on the words that the one before left.
    fn steps(self) -> &'static [(Cut, &'static str)] {
        const SPACES: Cut = Cut::Spaces {
            newlines_apart: false,
        };
        const SPACES_AND_LINES: Cut = Cut::Spaces {
            newlines_apart: true,
        };
        match self {
            Words::Llama3 => &[(SPACES_AND_LINES, LLAMA3_WORDS)],
            Words::Qwen2 => &[(SPACES_AND_LINES, QWEN2_WORDS)],
            Words::Qwen35 => &[(SPACES_AND_LINES, QWEN35_WORDS)],
            Words::Gpt4o => &[(SPACES_AND_LINES, GPT4O_WORDS)],
            Words::Tekken => &[(SPACES_AND_LINES, TEKKEN_WORDS)],
            Words::Gpt2 => &[(SPACES, GPT2_WORDS)],
            Words::SmolLm => &[(Cut::Matches, r"\p{N}"), (SPACES, GPT2_WORDS)],
            Words::Falcon => &[
                (Cut::Matches, r"[\p{P}$+<=>^~|`]+"),
                (SPACES, GPT2_WORDS),
                (Cut::Matches, r"[0-9][0-9][0-9]"),
            ],
            Words::DeepSeekLlm => &[
                (Cut::Matches, r"[\r\n]"),
                (Cut::Matches, CASED_LETTERS),
                // The last range begins at U+3001. The published pattern begins it at U+3000, but llama.cpp takes that for white space
                // before anything else.
                (
                    Cut::Matches,
                    r"\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3001}-\u{3002}]+",
                ),
                (Cut::Matches, r"\s+$"),
                (Cut::Matches, CJK),
                (Cut::Matches, r"\p{N}+"),
            ],
            Words::DeepSeekCoder => &[
                (Cut::Matches, r"[\r\n]"),
                (Cut::Matches, r"\s?\p{L}+"),
                (Cut::Matches, r"\s?\p{P}+"),
                (Cut::Matches, CJK),
                (Cut::Matches, r"\p{N}"),
            ],
            Words::DeepSeekV3 => &[
                (Cut::Matches, r"\p{N}{1,3}"),
                (
                    Cut::Matches,
                    r"[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+",
                ),
                (SPACES_AND_LINES, DEEPSEEK_V3_WORDS),
            ],
            Words::Kimi => &[(SPACES_AND_LINES, KIMI_WORDS)],
        }
    }
}

/// Contractions, words with a space before them, numbers with one, other characters with one, white space.
const GPT2_WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

/// Contractions in either case, words with any one character before them, up to three digits, other characters with the ends of
/// lines after them, white space up to the end of a line, white space.
const LLAMA3_WORDS: &str = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";

/// As [`LLAMA3_WORDS`], but every digit is a word.
const QWEN2_WORDS: &str = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";

/// As [`QWEN2_WORDS`], with marks among the letters.
const QWEN35_WORDS: &str = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";

/// Words with any one character before them, cut before a capital that follows a small letter, with the contraction behind them; up to
/// three digits; other characters with slashes and the ends of lines after them; white space as above.
const GPT4O_WORDS: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
);

/// As [`GPT4O_WORDS`], but contractions are words of their own, and so is every digit.
const TEKKEN_WORDS: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
);

/// A sign and letters; words with any one character before them; other characters with the ends of lines after them; white space.
const DEEPSEEK_V3_WORDS: &str = concat!(
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+"
);

/// As [`GPT4O_WORDS`], but Chinese characters are words apart, and no slashes follow others.
const KIMI_WORDS: &str = concat!(
    r"\p{Han}+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}--\p{Han}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}--\p{Han}]+(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}--\p{Han}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}--\p{Han}]*(?:'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);

/// DeepSeek's name for this is CJK, but the range U+0800 to U+4E00 includes much else. White space in it counts as white space first.
const CJK: &str = r"[[\u{4E00}-\u{9FA5}\u{800}-\u{4E00}\u{AC00}-\u{D7FF}]--\s]+";

/// DeepSeek LLM's list of the letters that have case.
const CASED_LETTERS: &str = concat!(
    r"\s?[A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\u{295}-\u{2AF}\u{370}-\u{373}\u{376}",
    r"\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\u{38C}\u{38E}-\u{3A1}\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}",
    r"\u{531}-\u{556}\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}",
    r"\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}",
    r"\u{1F59}\u{1F5B}\u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}",
    r"\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}",
    r"\u{2115}\u{2119}-\u{211D}\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}\u{2145}-\u{2149}",
    r"\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}\u{A680}-\u{A69B}",
    r"\u{A722}-\u{A76F}\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}",
    r"\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}",
    r"\u{118A0}-\u{118DF}\u{1E900}-\u{1E943}]+"
);

#[derive(Debug)]
struct Step {
    cut: Cut,
    regex: Regex,
}

/// What else makes words, besides matches and the stretches between them.
#[derive(Debug, Clone, Copy)]
enum Cut {
    /// Nothing.
    Matches,
    /// White space gives its last character to the word after it, unless it is a single character, or it ends a line and the pattern
    /// has a branch for the ends of lines.
    Spaces { newlines_apart: bool },
}

impl Step {
    fn cut<'t, E>(
        &self,
        text: &'t str,
        take: &mut dyn FnMut(&'t str) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut from = 0;
        while let Some(found) = self.regex.find_at(text, from) {
            take(&text[from..found.start()])?;
            let word = found.as_str();
            let given = match self.cut {
                Cut::Spaces { newlines_apart } if found.end() < text.len() => {
                    given_away(word, newlines_apart)
                }
                _ => 0,
            };
            from = found.end() - given;
            take(&text[found.start()..from])?;
        }
        take(&text[from..])
    }
}

/// How many bytes at the end of `word` belong to the next word. Apart from the ends of lines, only the branch `\s+` matches a word
/// that ends in white space.
fn given_away(word: &str, newlines_apart: bool) -> usize {
    let mut characters = word.chars();
    match characters.next_back() {
        Some('\r' | '\n') if newlines_apart => 0,
        Some(last) if last.is_whitespace() && characters.next().is_some() => last.len_utf8(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use proptest::prelude::*;

    fn words(name: &str, text: &'static str) -> Vec<&'static str> {
        words_of(&PreTokenizer::from_name(name).unwrap(), text)
    }

    fn words_of<'t>(pre_tokenizer: &PreTokenizer, text: &'t str) -> Vec<&'t str> {
        let mut words = Vec::new();
        let mut take = |word| -> Result<(), Infallible> {
            words.push(word);
            Ok(())
        };
        pre_tokenizer.each_word(text, &mut take).unwrap();
        words
    }

    #[test]
    fn white_space_gives_its_last_character_to_the_next_word() {
        assert_eq!(words("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("gpt-2", "a\n\nb\n\n"), ["a", "\n", "\n", "b", "\n\n"]);
        assert_eq!(
            words("llama-bpe", "a \n\n  b\t\tc  "),
            ["a", " \n\n", " ", " b", "\t", "\tc", "  "]
        );
        assert_eq!(
            words("qwen2", "a\u{3000}\u{3000}."),
            ["a", "\u{3000}", "\u{3000}", "."]
        );
    }

    #[test]
    fn digits_are_grouped_as_each_model_was_taught() {
        assert_eq!(words("gpt-2", "in 12345"), ["in", " 12345"]);
        assert_eq!(words("granite-docling", "in 12345"), ["in", " 12345"]);
        assert_eq!(words("llama-bpe", "in 12345"), ["in", " ", "123", "45"]);
        assert_eq!(words("qwen2", "in 123"), ["in", " ", "1", "2", "3"]);
        assert_eq!(words("smollm", "in  123"), ["in", "  ", "1", "2", "3"]);
        assert_eq!(words("deepseek-coder", "in 12"), ["in", " ", "1", "2"]);
        assert_eq!(words("deepseek-llm", "in 12"), ["in", " ", "12"]);
        assert_eq!(words("deepseek-v3", "in 1234"), ["in", " ", "123", "4"]);
        assert_eq!(words("gpt-4o", "in 1234"), ["in", " ", "123", "4"]);
        assert_eq!(words("tekken", "in 12"), ["in", " ", "1", "2"]);
        assert_eq!(words("falcon", "in 12345"), ["in", " ", "123", "45"]);
    }

    #[test]
    fn contractions_in_capitals_are_for_the_newer_models_only() {
        assert_eq!(words("gpt-2", "I'LL I'll"), ["I", "'", "LL", " I", "'ll"]);
        assert_eq!(words("llama-bpe", "I'LL we'Re"), ["I", "'LL", " we", "'Re"]);
        // U+017F folds to "s", but is none.
        assert_eq!(words("llama-bpe", "a'ſ"), ["a", "'ſ"]);
    }

    #[test]
    fn capitals_begin_words_where_models_were_taught_so() {
        assert_eq!(words("qwen2", "aBigWord's"), ["aBigWord", "'s"]);
        assert_eq!(words("gpt-4o", "aBigWord's"), ["a", "Big", "Word's"]);
        assert_eq!(words("tekken", "aBigWord's"), ["a", "Big", "Word", "'s"]);
        assert_eq!(
            words("gpt-4o", "HTTPServer a/\n/b"),
            ["HTTPServer", " a", "/\n/", "b"]
        );
        // Beyond ASCII, too. Marks belong to the letter before them, and scripts without case are not cut.
        for name in ["gpt-4o", "tekken"] {
            assert_eq!(
                words(name, "petitÉcole ЁжЖук"),
                ["petit", "École", " Ёж", "Жук"]
            );
            assert_eq!(
                words(name, "e\u{301}teE\u{301}te"),
                ["e\u{301}te", "E\u{301}te"]
            );
            assert_eq!(words(name, "ไทย中文"), ["ไทย中文"]);
        }
        assert_eq!(
            words("kimi-k2", "aBigWord's ไทย中文 中a/\n/b"),
            [
                "a",
                "Big",
                "Word's",
                " ไทย",
                "中文",
                " ",
                "中",
                "a",
                "/\n",
                "/b"
            ]
        );
    }

    #[test]
    fn an_unknown_name_is_refused_with_what_is_known() {
        for name in ["default", "bloom", ""] {
            let message = PreTokenizer::from_name(name).unwrap_err().to_string();
            assert!(message.contains(&format!("{name:?}")), "{message}");
            assert!(
                message.contains("llama-bpe, llama3, llama-v3, falcon3"),
                "{message}"
            );
        }
    }

    #[test]
    fn words_put_together_are_the_text() {
        let all = KNOWN.map(|known| (known.name, PreTokenizer::from_name(known.name).unwrap()));
        proptest!(|(text in r"(\PC|[ \t\r\n]|[a-z' ]{1,5}|[0-9]){0,60}")| {
            for (name, pre_tokenizer) in &all {
                prop_assert_eq!(words_of(pre_tokenizer, &text).concat(), text.as_str(), "{}", name);
            }
        });
    }
}
