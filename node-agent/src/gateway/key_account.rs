//! What each API key has used, and whether it may use more. It does not know the keys, only their names.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::api_keys::ApiKeys;

use super::openai_error::ApiError;

/// By the keys' names.
#[derive(Default)]
pub struct KeyAccounts(Mutex<BTreeMap<String, Arc<KeyAccount>>>);

/// Since the ring's start.
pub struct KeyAccount {
    name: String,
    requests: AtomicU64,
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    answer_microseconds: AtomicU64,
    budget: Mutex<Budget>,
}

/// What has been used, for people.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeyUsage {
    pub name: String,
    pub requests: u64,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    /// That its answers took, from their requests' submission to their ends.
    pub seconds: f64,
}

/// Fills at an even pace, up to the tokens of a minute. A request may begin while it is not empty, and then takes what it takes.
struct Budget {
    per_minute: Option<f64>,
    /// Tokens used that have not come back yet.
    used: f64,
    at: Instant,
}

const MINUTE: f64 = 60.0;

/// Keys of the command line and the plan are named `#1`, `#2`, ...; no entry of a Secret is.
pub const FIXED: char = '#';

impl KeyAccounts {
    /// The account of the key of this name. `keys`: the list that it is on, which says what it may use.
    pub fn of(&self, name: &str, keys: Option<&ApiKeys>) -> Arc<KeyAccount> {
        let mut accounts = self.lock();
        if !accounts.contains_key(name) {
            // Names that come and go must not fill the memory. Those of the command line stay.
            if let Some(keys) = keys {
                accounts
                    .retain(|known, _| keys.sha256.contains_key(known) || known.starts_with(FIXED));
            }
            accounts.insert(name.to_owned(), Arc::new(KeyAccount::new(name)));
        }
        let account = accounts[name].clone();
        let per_minute = keys.and_then(|keys| keys.limits.tokens_per_minute);
        let per_minute = per_minute.map(f64::from);
        let mut budget = account.budget();
        if budget.per_minute.is_none() {
            // What was used without a limit is not owed.
            (budget.used, budget.at) = (0.0, Instant::now());
        }
        budget.per_minute = per_minute;
        drop(budget);
        account
    }

    /// Of each key that was used.
    pub fn usage(&self) -> Vec<KeyUsage> {
        self.lock()
            .values()
            .map(|account| account.usage())
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<KeyAccount>>> {
        // Every change leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KeyAccount {
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            requests: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
            answer_microseconds: AtomicU64::new(0),
            budget: Mutex::new(Budget {
                per_minute: None,
                used: 0.0,
                at: Instant::now(),
            }),
        }
    }

    pub fn count_request(&self) {
        self.requests.fetch_add(1, Relaxed);
    }

    /// Whether tokens may be computed for it now.
    ///
    /// # Errors
    /// [`ApiError::KeyLimit`], with the time until they may.
    pub fn admit(&self, now: Instant) -> Result<(), ApiError> {
        let mut budget = self.budget();
        budget.come_back(now);
        match budget.per_minute {
            Some(per_minute) if budget.used >= per_minute => {
                let over = budget.used - per_minute + 1.0;
                Err(ApiError::KeyLimit {
                    name: self.name.clone(),
                    tokens_per_minute: per_minute as u64,
                    retry_after: Duration::from_secs_f64(over * MINUTE / per_minute),
                })
            }
            _ => Ok(()),
        }
    }

    /// A prompt was submitted, which is computed whole unless [`KeyAccount::kept`] takes some back.
    pub fn prompt(&self, tokens: usize) {
        self.prompt_tokens.fetch_add(tokens as u64, Relaxed);
        self.budget().used += tokens as f64;
    }

    /// So many of its prompt's tokens had been computed for an earlier request.
    pub fn kept(&self, tokens: usize) {
        let mut budget = self.budget();
        budget.used = (budget.used - tokens as f64).max(0.0);
    }

    pub fn token(&self) {
        self.generated_tokens.fetch_add(1, Relaxed);
        self.budget().used += 1.0;
    }

    /// An answer ended, so long after its request.
    pub fn answered(&self, after: Duration) {
        let microseconds = u64::try_from(after.as_micros()).unwrap_or(u64::MAX);
        self.answer_microseconds.fetch_add(microseconds, Relaxed);
    }

    fn usage(&self) -> KeyUsage {
        KeyUsage {
            name: self.name.clone(),
            requests: self.requests.load(Relaxed),
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            generated_tokens: self.generated_tokens.load(Relaxed),
            seconds: self.answer_microseconds.load(Relaxed) as f64 / 1e6,
        }
    }

    fn budget(&self) -> MutexGuard<'_, Budget> {
        // Numbers, which are always whole.
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Budget {
    fn come_back(&mut self, now: Instant) {
        let seconds = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        let back = self.per_minute.unwrap_or(0.0) / MINUTE * seconds;
        self.used = (self.used - back).max(0.0);
    }
}

#[cfg(test)]
mod tests {
    use prima_crds::v1alpha1::model::ApiKeyLimits;

    use super::*;

    fn keys(names: &[&str], tokens_per_minute: Option<i32>) -> ApiKeys {
        ApiKeys {
            sha256: names
                .iter()
                .map(|name| (name.to_string(), String::new()))
                .collect(),
            limits: ApiKeyLimits { tokens_per_minute },
            ..ApiKeys::default()
        }
    }

    fn retry_after(account: &KeyAccount, now: Instant) -> Option<f64> {
        match account.admit(now) {
            Ok(()) => None,
            Err(ApiError::KeyLimit { retry_after, .. }) => Some(retry_after.as_secs_f64()),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_minutes_tokens_come_back_within_a_minute() {
        let accounts = KeyAccounts::default();
        let account = accounts.of("alice", Some(&keys(&["alice"], Some(600))));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(retry_after(&account, at(0)), None);
        account.prompt(599);
        assert_eq!(retry_after(&account, at(0)), None);
        account.token();
        // A token more would be one too many: a tenth of a second of them.
        let wait = retry_after(&account, at(0)).expect("a refusal");
        assert!((wait - 0.1).abs() < 0.01, "{wait}");
        assert_eq!(retry_after(&account, at(1)), None);
        // Of a long prompt, the rest is owed.
        account.prompt(6_000);
        let wait = retry_after(&account, at(1)).expect("a refusal");
        assert!((wait - 599.1).abs() < 0.2, "{wait}");
        // Unless it had been computed before.
        account.kept(6_000);
        assert_eq!(retry_after(&account, at(1)), None);
    }

    #[test]
    fn a_limit_that_is_gone_or_new_counts_at_once() {
        let accounts = KeyAccounts::default();
        let limited = |limit| accounts.of("alice", Some(&keys(&["alice"], limit)));
        let now = Instant::now();
        limited(None).prompt(1_000_000);
        assert_eq!(retry_after(&limited(Some(10)), now), None);
        limited(Some(10)).prompt(10);
        assert!(retry_after(&limited(Some(10)), now).is_some());
        assert_eq!(retry_after(&limited(None), now), None);
    }

    #[test]
    fn accounts_of_keys_that_are_gone_go_when_another_comes() {
        let accounts = KeyAccounts::default();
        for name in ["alice", "bob"] {
            accounts
                .of(name, Some(&keys(&["alice", "bob"], None)))
                .count_request();
        }
        accounts.of("carol", Some(&keys(&["bob", "carol"], None)));
        let names = accounts.usage().into_iter().map(|used| used.name);
        assert_eq!(names.collect::<Vec<_>>(), ["bob", "carol"]);
        let bob = &accounts.usage()[0];
        assert_eq!((bob.requests, bob.generated_tokens), (1, 0));
    }
}
