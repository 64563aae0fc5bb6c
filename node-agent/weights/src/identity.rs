//! What tells one version of a file from another.

use serde::{Deserialize, Serialize};

/// What tells one version of a file from another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FileIdentity {
    pub size_bytes: u64,
    /// The server's name for this version: its ETag without quotes, or the date of its last change where it has no ETag.
    pub etag: Option<String>,
    /// In lower-case hexadecimal.
    pub sha256: Option<String>,
    /// The repository's commit; says nothing about the file, which most commits leave as it is.
    pub revision_commit: Option<String>,
}

/// How two versions of a file differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The property.
    pub what: &'static str,
    pub expected: String,
    pub found: String,
}

impl FileIdentity {
    /// Whether `found` is the same version of the file. If both have a digest, only the digest and the size count.
    ///
    /// # Errors
    /// The first difference.
    pub fn same_file(&self, found: &FileIdentity) -> Result<(), Difference> {
        if self.size_bytes != found.size_bytes {
            return Err(difference(
                "size in bytes",
                &self.size_bytes,
                Some(&found.size_bytes),
            ));
        }
        match (&self.sha256, &found.sha256, &self.etag, &found.etag) {
            (Some(expected), Some(found), ..) if expected != found => {
                Err(difference("sha256", expected, Some(found)))
            }
            (Some(_), Some(_), ..) => Ok(()),
            (_, _, Some(expected), found) if found.as_ref() != Some(expected) => {
                Err(another_version(found.as_ref()))
            }
            _ => Ok(()),
        }
    }
}

/// The names of versions are a server's own text, which is not repeated.
pub(crate) fn another_version(found: Option<&String>) -> Difference {
    difference("version (ETag)", &"one", found.map(|_| &"another"))
}

pub(crate) fn difference<T: ToString>(
    what: &'static str,
    expected: &T,
    found: Option<&T>,
) -> Difference {
    Difference {
        what,
        expected: expected.to_string(),
        found: found.map_or_else(|| "not given".to_owned(), T::to_string),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_decides_where_both_have_one() {
        let identity =
            |size_bytes, etag: Option<&str>, sha256: Option<&str>, commit: &str| FileIdentity {
                size_bytes,
                etag: etag.map(str::to_owned),
                sha256: sha256.map(str::to_owned),
                revision_commit: Some(commit.to_owned()),
            };
        let known = identity(9, Some("e"), Some("s"), "1");
        assert_eq!(
            known.same_file(&identity(9, Some("other"), Some("s"), "2")),
            Ok(())
        );
        assert_eq!(known.same_file(&identity(9, Some("e"), None, "2")), Ok(()));
        for (other, what) in [
            (identity(8, Some("e"), Some("s"), "1"), "size in bytes"),
            (identity(9, Some("e"), Some("t"), "1"), "sha256"),
            (identity(9, Some("f"), None, "1"), "version (ETag)"),
            (identity(9, None, None, "1"), "version (ETag)"),
        ] {
            assert_eq!(known.same_file(&other).unwrap_err().what, what);
        }
    }
}
