//! What a member says of itself when it opens a stream to its successor, and whether the successor takes it. Pure.
//!
//! A refusal does not tell what was expected: who has to know reads the plan.

use tonic::Status;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};

pub const VERSION_KEY: &str = "prima-ring-version";
pub const UID_KEY: &str = "prima-plan-uid";
pub const GENERATION_KEY: &str = "prima-plan-generation";
pub const RANK_KEY: &str = "prima-member-rank";

/// Of what members say to each other. Members of the first version do not tell theirs; they speak as this one does, without TLS.
pub const RING_VERSION: i64 = 1;

/// Which member of which plan.
#[derive(Clone, Debug)]
pub struct Greeting {
    /// Of the plan's document in a cluster: plans of several Models may have the same generation.
    pub uid: Option<MetadataValue<Ascii>>,
    pub generation: i64,
    pub rank: usize,
}

impl Greeting {
    pub fn write(&self, metadata: &mut MetadataMap) {
        metadata.insert(VERSION_KEY, RING_VERSION.into());
        if let Some(uid) = &self.uid {
            metadata.insert(UID_KEY, uid.clone());
        }
        metadata.insert(GENERATION_KEY, self.generation.into());
        metadata.insert(RANK_KEY, self.rank.into());
    }

    /// Whether somebody who said this is the expected one. Over TLS all of it has to be said.
    ///
    /// # Errors
    /// FAILED_PRECONDITION, with the words for whoever called.
    pub fn check(&self, said: &MetadataMap, encrypted: bool) -> Result<(), Status> {
        let of_first_version = !encrypted && said.get(VERSION_KEY).is_none();
        if !of_first_version && decimal(said, VERSION_KEY) != Some(RING_VERSION) {
            return Err(Status::failed_precondition(format!(
                "this member speaks version {RING_VERSION} of the ring's protocol: update the agents of all members to one version"
            )));
        }
        let uid = match (&self.uid, said.get(UID_KEY)) {
            (Some(uid), Some(said)) => uid == said,
            (Some(_), None) => of_first_version,
            (None, _) => !encrypted,
        };
        let rest = decimal(said, GENERATION_KEY) == Some(self.generation)
            && decimal(said, RANK_KEY) == Some(self.rank as i64);
        match uid && rest {
            true => Ok(()),
            false => Err(Status::failed_precondition(
                "the caller is not this member's predecessor in its plan",
            )),
        }
    }
}

fn decimal(metadata: &MetadataMap, key: &str) -> Option<i64> {
    metadata.get(key)?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn greeting() -> Greeting {
        Greeting {
            uid: Some(MetadataValue::from_static("8f3e")),
            generation: 7,
            rank: 2,
        }
    }

    fn said(change: impl FnOnce(&mut MetadataMap)) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        greeting().write(&mut metadata);
        change(&mut metadata);
        metadata
    }

    #[test]
    fn only_the_same_greeting_is_taken() {
        for encrypted in [false, true] {
            let check = |said: &MetadataMap| greeting().check(said, encrypted);
            check(&said(|_| {})).unwrap();
            for (key, other) in [
                (UID_KEY, "8f3f"),
                (GENERATION_KEY, "6"),
                (GENERATION_KEY, "seven"),
                (RANK_KEY, "1"),
                (RANK_KEY, "-2"),
            ] {
                let other = MetadataValue::from_static(other);
                let refusal = check(&said(|said| drop(said.insert(key, other)))).unwrap_err();
                let words = "the caller is not this member's predecessor in its plan";
                assert_eq!(refusal.message(), words, "{key}");
            }
            for key in [UID_KEY, GENERATION_KEY, RANK_KEY] {
                assert!(
                    check(&said(|said| drop(said.remove(key)))).is_err(),
                    "{key}"
                );
            }
            let newer = said(|said| drop(said.insert(VERSION_KEY, 2.into())));
            let refusal = check(&newer).unwrap_err();
            assert!(refusal.message().contains("version 1"), "{refusal}");
        }
    }

    #[test]
    fn the_first_version_says_less_and_is_taken_without_tls_only() {
        let first = said(|said| {
            said.remove(VERSION_KEY);
            said.remove(UID_KEY);
        });
        greeting().check(&first, false).unwrap();
        greeting().check(&first, true).unwrap_err();
        // Nor is a plan without a uid ever taken over TLS.
        let no_uid = Greeting {
            uid: None,
            ..greeting()
        };
        no_uid.check(&said(|_| {}), false).unwrap();
        no_uid.check(&said(|_| {}), true).unwrap_err();
    }
}
