//! Other projects' definitions of kinds that the chart makes objects of, in the versions of `tests/definitions/go.mod`.

use std::fs;

use crate::programs::folder_made_by;

/// All of them, as YAML.
pub fn foreign() -> String {
    let folder = folder_made_by("definitions", &["tests/definitions/fetch.sh"]);
    let files = fs::read_dir(&folder);
    let files = files.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let texts = files.map(|file| {
        let file = file.expect("a file").path();
        fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
    });
    texts.collect::<Vec<_>>().join("\n---\n")
}
