//! Where a model file is said to be: a file in a repository of a Hugging Face hub, or an address.
//!
//! Decides: what such a description must look like. Refuses: anything that could name another file than it seems to (`..`,
//! control characters, other schemes than http and https), and to show a token.

use std::fmt;

use prima_gguf::part_name;
use reqwest::Url;
use reqwest::header::HeaderValue;

/// The longest field that is looked at.
const MAX_FIELD_BYTES: usize = 2048;

/// A model file and what it takes to fetch it.
#[derive(Debug, Clone)]
pub struct Source {
    pub location: Location,
    /// Sent to the location's own server only.
    pub token: Option<Token>,
}

/// Where a model file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    HuggingFace {
        /// The hub or a mirror of it, such as `https://huggingface.co`.
        endpoint: String,
        /// `owner/name`.
        repo: String,
        /// A branch, a tag or a commit.
        revision: String,
        /// The file's path in the repository.
        file: String,
    },
    Url {
        url: String,
        /// The file's digest in hexadecimal, where it is known.
        sha256: Option<String>,
    },
}

/// A bearer token. Its text is never shown.
#[derive(Clone)]
pub struct Token(HeaderValue);

/// Why a description cannot be followed; `field` is the field as users know it.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SourceError {
    #[error("{field}: expected {expected}, found {found:?}")]
    Field {
        field: &'static str,
        expected: &'static str,
        found: String,
    },
    #[error(
        "token: expected visible ASCII characters only; look for a line break or a space in it"
    )]
    Token,
}

impl Token {
    /// A token as a user gives it.
    ///
    /// # Errors
    /// [`SourceError::Token`] for what cannot be a token.
    pub fn new(token: &str) -> Result<Token, SourceError> {
        if token.is_empty()
            || token.len() > MAX_FIELD_BYTES
            || !token.bytes().all(|byte| byte.is_ascii_graphic())
        {
            return Err(SourceError::Token);
        }
        let mut value =
            HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| SourceError::Token)?;
        value.set_sensitive(true);
        Ok(Token(value))
    }

    pub(crate) fn header(&self) -> HeaderValue {
        self.0.clone()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Source {
    /// The address to request the file from.
    ///
    /// # Errors
    /// [`SourceError::Field`] for the first invalid field.
    pub fn url(&self) -> Result<Url, SourceError> {
        match &self.location {
            Location::HuggingFace {
                endpoint,
                repo,
                revision,
                file,
            } => {
                let repo: Vec<&str> = repo_parts(repo)?;
                revision_is_sound(revision)?;
                let file = file_parts(file)?;
                let mut url = absolute("endpoint", endpoint)?;
                if url.query().is_some() {
                    return Err(refused("endpoint", "an address without a query", endpoint));
                }
                if let Ok(mut path) = url.path_segments_mut() {
                    // A revision such as refs/pr/1 is one segment: its slashes are escaped.
                    path.pop_if_empty()
                        .extend(repo)
                        .push("resolve")
                        .push(revision)
                        .extend(file);
                }
                Ok(url)
            }
            Location::Url { url, sha256 } => {
                if let Some(digest) = sha256 {
                    let hexadecimal = digest.bytes().all(|byte| byte.is_ascii_hexdigit());
                    if digest.len() != 64 || !hexadecimal {
                        return Err(refused("sha256", "64 hexadecimal digits", digest));
                    }
                }
                absolute("url", url)
            }
        }
    }

    /// The file's name, without the path to it.
    pub fn file_name(&self) -> String {
        let path = match &self.location {
            Location::HuggingFace { file, .. } => file.clone(),
            Location::Url { .. } => self
                .url()
                .map_or_else(|_| String::new(), |url| url.path().to_owned()),
        };
        path.rsplit('/').next().unwrap_or_default().to_owned()
    }

    /// Another file of the same model: this is the first of `count`.
    ///
    /// # Errors
    /// [`SourceError::Field`] when this has not the name of the first, and when a digest of it is given: it says nothing about the others.
    pub(crate) fn part(&self, number: u64, count: u64) -> Result<Source, SourceError> {
        const EXPECTED: &str =
            "the name of the first of several files, such as model-00001-of-00003.gguf";
        let named = |field, text: &str| {
            part_name(text, number, count).ok_or_else(|| refused(field, EXPECTED, text))
        };
        let location = match &self.location {
            Location::HuggingFace {
                endpoint,
                repo,
                revision,
                file,
            } => Location::HuggingFace {
                endpoint: endpoint.clone(),
                repo: repo.clone(),
                revision: revision.clone(),
                file: named("file", file)?,
            },
            Location::Url {
                sha256: Some(digest),
                ..
            } => {
                let expected =
                    "no digest for a model in several files, as it is that of the first only";
                return Err(refused("sha256", expected, digest));
            }
            Location::Url { url, sha256: None } => {
                let (path, query) = match url.split_once('?') {
                    Some((path, query)) => (path, format!("?{query}")),
                    None => (url.as_str(), String::new()),
                };
                Location::Url {
                    url: named("url", path)? + &query,
                    sha256: None,
                }
            }
        };
        Ok(Source {
            location,
            token: self.token.clone(),
        })
    }

    /// The digest that the user expects of the file.
    pub(crate) fn sha256(&self) -> Option<String> {
        match &self.location {
            Location::Url { sha256, .. } => {
                sha256.as_ref().map(|digest| digest.to_ascii_lowercase())
            }
            Location::HuggingFace { .. } => None,
        }
    }

    /// Names the file across its versions: for a file in a repository, everything but the revision, since most commits do not change the
    /// file.
    pub(crate) fn place(&self) -> String {
        match &self.location {
            Location::HuggingFace {
                endpoint,
                repo,
                revision: _,
                file,
            } => {
                format!("{}/{repo}/{file}", endpoint.trim_end_matches('/'))
            }
            Location::Url { url, .. } => url.clone(),
        }
    }
}

fn repo_parts(repo: &str) -> Result<Vec<&str>, SourceError> {
    let parts: Vec<&str> = repo.split('/').collect();
    let sound = |part: &&str| {
        let letters = part
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        !part.is_empty() && part.len() <= 96 && letters && !part.contains("..") && *part != "."
    };
    if parts.len() > 2 || !parts.iter().all(sound) {
        return Err(refused(
            "repo",
            "owner/name in letters, digits, '-', '_' and '.'",
            repo,
        ));
    }
    Ok(parts)
}

fn revision_is_sound(revision: &str) -> Result<(), SourceError> {
    let sound = !revision.is_empty()
        && revision.len() <= 255
        && !revision.contains("..")
        && revision != "."
        && !revision
            .chars()
            .any(|c| c.is_control() || c.is_whitespace());
    if sound {
        return Ok(());
    }
    Err(refused(
        "revision",
        "a branch, a tag or a commit, such as main",
        revision,
    ))
}

fn file_parts(file: &str) -> Result<Vec<&str>, SourceError> {
    let parts: Vec<&str> = file.split('/').collect();
    let sound = |part: &&str| !part.is_empty() && *part != "." && *part != "..";
    let characters =
        file.len() <= MAX_FIELD_BYTES && !file.chars().any(|c| c.is_control() || c == '\\');
    if !characters || !parts.iter().all(sound) {
        return Err(refused(
            "file",
            "a path inside the repository, such as model-Q4_K_M.gguf",
            file,
        ));
    }
    Ok(parts)
}

fn absolute(field: &'static str, text: &str) -> Result<Url, SourceError> {
    const EXPECTED: &str = "an address that begins with http:// or https://";
    // The parser would leave out control characters and resolve "..": what it shows then is not what was written.
    if text.len() > MAX_FIELD_BYTES || text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(refused(
            field,
            "an address without control characters and spaces",
            text,
        ));
    }
    let path = text
        .split(['?', '#'])
        .next()
        .unwrap_or_default()
        .to_ascii_lowercase()
        .replace("%2e", ".");
    if path.split(['/', '\\']).any(|part| part == "..") {
        return Err(refused(field, "an address without \"..\"", text));
    }
    let url = Url::parse(text).map_err(|_| refused(field, EXPECTED, text))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(refused(field, EXPECTED, text));
    }
    if !url.username().is_empty() || url.password().is_some() {
        // Not echoed: it holds a password.
        return Err(refused(
            field,
            "an address without a user and a password; give a token instead",
            "one with them",
        ));
    }
    if url.fragment().is_some() {
        return Err(refused(field, "an address without '#'", text));
    }
    Ok(url)
}

fn refused(field: &'static str, expected: &'static str, found: &str) -> SourceError {
    let found = found.chars().take(120).collect();
    SourceError::Field {
        field,
        expected,
        found,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(endpoint: &str, repo: &str, revision: &str, file: &str) -> Source {
        let location = Location::HuggingFace {
            endpoint: endpoint.to_owned(),
            repo: repo.to_owned(),
            revision: revision.to_owned(),
            file: file.to_owned(),
        };
        Source {
            location,
            token: None,
        }
    }

    fn address(url: &str, sha256: Option<&str>) -> Source {
        let location = Location::Url {
            url: url.to_owned(),
            sha256: sha256.map(str::to_owned),
        };
        Source {
            location,
            token: None,
        }
    }

    const HUB: &str = "https://huggingface.co";

    #[test]
    fn the_hubs_address_is_built_and_escaped() {
        for (source, expected) in [
            (
                hub(
                    HUB,
                    "bartowski/Llama-3.2-1B-GGUF",
                    "main",
                    "Llama-3.2-1B-Q4_K_M.gguf",
                ),
                "https://huggingface.co/bartowski/Llama-3.2-1B-GGUF/resolve/main/Llama-3.2-1B-Q4_K_M.gguf",
            ),
            (
                hub(
                    "http://mirror.lan:8080/hf/",
                    "a/b",
                    "refs/pr/1",
                    "Q4 K/m?%.gguf",
                ),
                "http://mirror.lan:8080/hf/a/b/resolve/refs%2Fpr%2F1/Q4%20K/m%3F%25.gguf",
            ),
        ] {
            assert_eq!(source.url().unwrap().as_str(), expected);
        }
        assert_eq!(hub(HUB, "a/b", "main", "x/m.gguf").file_name(), "m.gguf");
        assert_eq!(
            address("https://nas/models/m.gguf?x=/y", None).file_name(),
            "m.gguf"
        );
    }

    #[test]
    fn the_other_files_of_a_model_are_beside_the_first() {
        let first = hub(HUB, "a/b", "main", "Q4/m-00001-of-00003.gguf");
        let third = first.part(3, 3).unwrap();
        assert_eq!(
            third.url().unwrap().as_str(),
            "https://huggingface.co/a/b/resolve/main/Q4/m-00003-of-00003.gguf"
        );
        let first = address("https://nas/m-00001-of-00002.gguf?x=1", None);
        let second = first.part(2, 2).unwrap();
        assert_eq!(
            second.url().unwrap().as_str(),
            "https://nas/m-00002-of-00002.gguf?x=1"
        );
        let digest = "0".repeat(64);
        for (source, field) in [
            (hub(HUB, "a/b", "main", "m.gguf"), "file"),
            (address("https://nas/m-00001-of-00003.gguf", None), "url"),
            (
                address("https://nas/m-00001-of-00002.gguf", Some(&digest)),
                "sha256",
            ),
        ] {
            let error = source.part(2, 2).unwrap_err();
            assert!(
                matches!(error, SourceError::Field { field: found, .. } if found == field),
                "{error}"
            );
        }
    }

    #[test]
    fn what_is_wrong_is_told_by_its_field() {
        for (source, field) in [
            (hub("ftp://h", "a/b", "main", "f"), "endpoint"),
            (hub("huggingface.co", "a/b", "main", "f"), "endpoint"),
            (hub("https://h/../x", "a/b", "main", "f"), "endpoint"),
            (hub("https://h?x", "a/b", "main", "f"), "endpoint"),
            (hub(HUB, "a/b/c", "main", "f"), "repo"),
            (hub(HUB, "", "main", "f"), "repo"),
            (hub(HUB, "../b", "main", "f"), "repo"),
            (hub(HUB, "a/b\n", "main", "f"), "repo"),
            (hub(HUB, "a/b", "", "f"), "revision"),
            (hub(HUB, "a/b", "..", "f"), "revision"),
            (hub(HUB, "a/b", "ma\nin", "f"), "revision"),
            (hub(HUB, "a/b", "main", ""), "file"),
            (hub(HUB, "a/b", "main", "../f"), "file"),
            (hub(HUB, "a/b", "main", "x//f"), "file"),
            (hub(HUB, "a/b", "main", "x\u{1b}f"), "file"),
            (address("file:///etc/passwd", None), "url"),
            (address("https://h/a/%2E%2e/b", None), "url"),
            (address("https://h/a\t/b", None), "url"),
            (address("https://user:secret@h/b", None), "url"),
            (address("https://h/b", Some("abc")), "sha256"),
        ] {
            let error = source.url().unwrap_err();
            assert!(
                matches!(error, SourceError::Field { field: found, .. } if found == field),
                "{error}"
            );
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_token_is_never_shown() {
        let token = Token::new("hf_secret").unwrap();
        let source = Source {
            token: Some(token),
            ..address("https://h/m.gguf", None)
        };
        assert!(!format!("{source:?}").contains("secret"));
        for bad in ["", "hf_secret\n", "hf secret"] {
            let error = Token::new(bad).unwrap_err();
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
