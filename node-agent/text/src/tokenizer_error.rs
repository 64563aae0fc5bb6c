//! What is wrong with a tokenizer in a model's file.

use prima_gguf::GgufError;

/// Why a model's file has no usable tokenizer, or a text has no tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    #[error("cannot read the tokenizer's metadata")]
    Metadata {
        #[from]
        source: GgufError,
    },

    #[error(
        "metadata key \"tokenizer.ggml.model\": expected \"gpt2\" (byte-pair encoding), \"gemma4\" (the same from characters) or \"llama\" (SentencePiece), found {found:?}"
    )]
    UnknownModel { found: String },

    #[error("metadata key \"tokenizer.ggml.pre\": expected one of {known}, found {found:?}")]
    UnknownPreTokenizer { found: String, known: String },

    #[error(
        "metadata key \"tokenizer.ggml.pre\": expected one of {known}, found no such key: convert the model again with a current converter"
    )]
    MissingPreTokenizer { known: String },

    #[error("cannot build the patterns of the pre-tokenizer {pre_tokenizer}")]
    Pattern {
        pre_tokenizer: String,
        source: regex::Error,
    },

    #[error("cannot build the search for special tokens")]
    SpecialTokens { source: aho_corasick::BuildError },

    #[error("metadata key \"{key}\": expected {expected}, found {found} elements")]
    Length {
        key: &'static str,
        expected: String,
        found: usize,
    },

    #[error(
        "metadata key \"tokenizer.ggml.tokens\": expected every token once, found {text:?} as {first} and {second}"
    )]
    DuplicateToken {
        text: String,
        first: u32,
        second: u32,
    },

    #[error(
        "metadata key \"tokenizer.ggml.token_type\", token {token}: expected a type from 0 to 6, found {found}"
    )]
    TokenType { token: u32, found: i32 },

    #[error(
        "metadata key \"tokenizer.ggml.tokens\": expected the byte token {token} to be written like \"<0x0A>\", found {text:?}"
    )]
    ByteToken { token: u32, text: String },

    #[error(
        "metadata key \"{key}\": expected a token of the vocabulary of {vocabulary}, found {id}"
    )]
    SpecialTokenId {
        key: &'static str,
        id: u32,
        vocabulary: usize,
    },

    #[error("metadata key \"{key}\" asks for a {name} token: expected one to be named, found none")]
    NoSuchSpecialToken {
        key: &'static str,
        name: &'static str,
    },

    #[error(
        "metadata key \"tokenizer.ggml.merges\", line {rank}: expected two tokens whose union is a token, found {line:?}"
    )]
    Merge { rank: u32, line: String },

    #[error(
        "metadata key \"{key}\": expected an array of F32, one for each token, found no such key"
    )]
    MissingScores { key: &'static str },

    #[error("metadata key \"tokenizer.ggml.scores\", token {token}: expected a number, found NaN")]
    Score { token: u32 },

    #[error(
        "cannot tokenize the text: it needs a token for the byte 0x{byte:02X}, and the vocabulary has none"
    )]
    NoByteToken { byte: u8 },

    #[error("the text has more than {limit} tokens")]
    TooLong { limit: usize },
}
