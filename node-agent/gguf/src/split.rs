//! Models in several files, as `llama-gguf-split` writes them: `name-00001-of-00003.gguf` and so on. Each has a header and some of the
//! tensors; the metadata is in the first, which may have no tensors at all.
//!
//! Decides: how the parts are called, whether they belong together, and where their bytes lie when they are taken as one file.
//! Refuses: to begin with another part than the first.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::{GgufError, shown};
use crate::gguf::Gguf;
use crate::name_index::NameIndex;
use crate::part::FilePart;

/// The most parts that a model may have. Published models of a trillion weights have some 60.
const MAX_PARTS: u64 = 1024;

/// In the offsets of a joined header every part begins at a multiple of this: the largest page of any system that prima runs on, so
/// that pages of the files are pages of the whole.
const PART_ALIGNMENT: u64 = 64 << 10;

pub(crate) const NUMBER_KEY: &str = "split.no";
pub(crate) const COUNT_KEY: &str = "split.count";
pub(crate) const TENSORS_KEY: &str = "split.tensors.count";

/// The names or addresses of all files of a model. `first` is the name of the file with the header `header`.
///
/// # Errors
/// [`GgufError::Part`] when that is not the first part, or has not the name of one; [`GgufError::KeyType`] for keys that are no numbers.
pub fn part_names(first: &str, header: &Gguf) -> Result<Vec<String>, GgufError> {
    let count = header.metadata.u64(COUNT_KEY)?.unwrap_or(1);
    if count <= 1 {
        return Ok(vec![first.to_owned()]);
    }
    let part = |expected: String, found: String| GgufError::Part {
        file: first.to_owned(),
        expected,
        found,
    };
    if count > MAX_PARTS {
        let expected = format!("at most {MAX_PARTS} parts");
        return Err(part(expected, format!("{COUNT_KEY} = {count}")));
    }
    let number = header.metadata.u64(NUMBER_KEY)?.unwrap_or(0);
    if number != 0 {
        let expected = format!("the first of {count} parts, with which a model begins");
        return Err(part(expected, format!("part {}", number + 1)));
    }
    match first_part(first) {
        Some((_, named)) if named == count => Ok((1..=count)
            .filter_map(|number| part_name(first, number, count))
            .collect()),
        _ => {
            let expected = format!("a name that ends in {}", suffix(1, count));
            Err(part(expected, "another name".to_owned()))
        }
    }
}

/// The files of a model, by the name of its first: whether they are there was not looked at.
pub fn part_paths(first: &Path) -> Vec<PathBuf> {
    let name = first.file_name().and_then(|name| name.to_str());
    match name.and_then(|name| Some((name, first_part(name)?.1))) {
        Some((name, count)) => (1..=count)
            .filter_map(|number| part_name(name, number, count))
            .map(|part| first.with_file_name(part))
            .collect(),
        None => vec![first.to_owned()],
    }
}

/// What the name of a model's first file begins with, and how many files there are; `None` for the name of a model in one file.
pub fn first_part(name: &str) -> Option<(&str, u64)> {
    let (_, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let count = count.parse().ok()?;
    let prefix = name.strip_suffix(&suffix(1, count))?;
    (2..=MAX_PARTS).contains(&count).then_some((prefix, count))
}

/// Bytes of all files of the model that begins with the file at `first`.
///
/// # Errors
/// A file that is not there, or cannot be looked at.
pub fn model_bytes(first: &Path) -> io::Result<u64> {
    let lengths = part_paths(first).into_iter().map(|path| {
        std::fs::metadata(&path)
            .map(|metadata| metadata.len())
            .map_err(|error| match path == first {
                true => error,
                false => io::Error::new(error.kind(), format!("{}: {error}", path.display())),
            })
    });
    lengths.sum()
}

/// The name of another of `count` parts, if `first` is that of the first.
pub fn part_name(first: &str, number: u64, count: u64) -> Option<String> {
    let prefix = first.strip_suffix(&suffix(1, count))?;
    Some(format!("{prefix}{}", suffix(number, count)))
}

/// What the name of a part ends with.
fn suffix(number: u64, count: u64) -> String {
    format!("-{number:05}-of-{count:05}.gguf")
}

impl Gguf {
    /// The header of a model out of those of its files, called `names`, in order. Its tensors' offsets are as if the files lay behind one
    /// another, as [`Gguf::parts`] says.
    ///
    /// # Errors
    /// [`GgufError::Part`] when a file is another part or of another model.
    pub fn join(names: &[String], headers: Vec<Gguf>) -> Result<Gguf, GgufError> {
        let count = headers.len() as u64;
        let mut headers = headers.into_iter().zip(names);
        let Some((mut whole, first)) = headers.next() else {
            return Err(GgufError::Part {
                file: "the model".to_owned(),
                expected: "at least one file".to_owned(),
                found: "none".to_owned(),
            });
        };
        if count == 1 {
            return Ok(whole);
        }
        let tensors = whole.metadata.u64(TENSORS_KEY)?;
        // Of each tensor, the file that it is in.
        let mut files = vec![first; whole.tensors.len()];
        for (at, (header, name)) in (1..).zip(headers) {
            for (key, expected) in [(NUMBER_KEY, at), (COUNT_KEY, count)] {
                let found = header.metadata.u64(key)?;
                if found != Some(expected) {
                    return Err(GgufError::Part {
                        file: name.clone(),
                        expected: format!("part {} of {count}, with {key} = {expected}", at + 1),
                        found: found.map_or("no such key".to_owned(), |found| found.to_string()),
                    });
                }
            }
            let end = whole.parts.last().map_or(0, |last| last.start + last.len);
            // Both files exist, so their lengths together are far from overflowing.
            let start = end.next_multiple_of(PART_ALIGNMENT);
            whole.file_len += header.file_len;
            whole
                .parts
                .extend(header.parts.iter().map(|part| FilePart { start, ..*part }));
            files.resize(files.len() + header.tensors.len(), name);
            whole
                .tensors
                .extend(header.tensors.into_iter().map(|mut tensor| {
                    tensor.offset += start;
                    tensor
                }));
        }
        let found = whole.tensors.len() as u64;
        if let Some(expected) = tensors.filter(|expected| *expected != found) {
            return Err(GgufError::Part {
                file: first.clone(),
                expected: format!("{expected} tensors in all parts together ({TENSORS_KEY})"),
                found: format!("{found}: a part is of another model"),
            });
        }
        whole.by_name = NameIndex::new(whole.tensors.len(), |at| &whole.tensors[at].name).map_err(
            |(first, second)| GgufError::Part {
                file: files[second].clone(),
                expected: "tensors that no other part has".to_owned(),
                found: format!(
                    "{}, which {} has, too",
                    shown(&whole.tensors[second].name),
                    files[first]
                ),
            },
        )?;
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_called_as_the_first_is() {
        let paths = part_paths(Path::new("/m/a-b-00001-of-00003.gguf"));
        let names = ["1", "2", "3"].map(|number| format!("/m/a-b-0000{number}-of-00003.gguf"));
        assert_eq!(paths, names.map(PathBuf::from));
        for alone in [
            "a.gguf",
            "a-00002-of-00003.gguf",
            "a-0001-of-00003.gguf",
            "a-00001-of-00001.gguf",
            "a-00001-of-99999.gguf",
            "a00001-of-00003.gguf",
            "\u{e9}0001-of-00003.gguf",
            "a-00001-of-00003.bin",
        ] {
            assert_eq!(
                part_paths(Path::new(alone)),
                [PathBuf::from(alone)],
                "{alone}"
            );
        }
    }
}
