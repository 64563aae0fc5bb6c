//! Who may borrow this machine. Whoever sends the secret of the word that the agent shows is known by its key from then on, also after the
//! agent has started again. A word is good for one borrower. The door is open where nobody is known, or when the owner asks for it.
//!
//! While the word is unused, strangers get as far as the request that sends a secret; otherwise the handshake of TLS refuses them. Who
//! guesses closes the door.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::rand::{SecureRandom as _, SystemRandom};

use super::known::{Known, KnownError};
use super::word::{SECRET_BYTES, Secret};
use crate::ring::{Accepted, Fingerprint, Peer, Pins};

/// Wrong secrets, of all callers together, that close the door.
pub const MAX_WRONG: u32 = 20;

#[derive(Debug, thiserror::Error)]
pub enum DoorError {
    #[error(transparent)]
    Known(#[from] KnownError),
    #[error("the system gave no random numbers for a word")]
    Random,
}

/// Why somebody is not taken in. It tells nothing of what was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the word is another: look again at what `prima agent` shows on that machine")]
    Wrong,
    #[error(
        "its word is used, or was guessed at too often: start `prima agent --enrol` there, and take the word that it shows then"
    )]
    Closed,
    #[error("the agent cannot remember this machine: see what it says there")]
    NotKept,
}

pub struct Door {
    known: Known,
    pins: Pins,
    open: Arc<AtomicBool>,
    invitation: Mutex<Invitation>,
}

struct Invitation {
    secret: Secret,
    wrong: u32,
}

impl Door {
    /// For those whom `known` has. One more is taken in if that is nobody, or with `enrol`.
    ///
    /// # Errors
    /// When it is not known who is known, or there are no random numbers.
    pub fn new(known: Known, enrol: bool) -> Result<Self, DoorError> {
        let mut secret = [0; SECRET_BYTES];
        let filled = SystemRandom::new().fill(&mut secret);
        filled.map_err(|_| DoorError::Random)?;
        let pins = Pins::default();
        // What is no fingerprint opens nothing.
        let borrowers = known.borrowers()?;
        pins.set(borrowers.keys().filter_map(|key| key.parse().ok()));
        Ok(Self {
            known,
            pins,
            open: Arc::new(AtomicBool::new(enrol || borrowers.is_empty())),
            invitation: Mutex::new(Invitation { secret, wrong: 0 }),
        })
    }

    /// Whose connections are accepted.
    pub fn accepted(&self) -> Accepted {
        Accepted::OrAnybodyWhile(self.pins.clone(), self.open.clone())
    }

    pub fn knows(&self, key: &Fingerprint) -> bool {
        self.pins.contains(key)
    }

    /// Names of the borrowers.
    ///
    /// # Errors
    /// When there is a file that cannot be used.
    pub fn known(&self) -> Result<Vec<String>, KnownError> {
        Ok(self.known.borrowers()?.into_values().collect())
    }

    /// By which one more is taken in, if one is.
    pub fn secret(&self) -> Option<Secret> {
        let open = self.open.load(Ordering::Acquire);
        open.then(|| self.invitation().secret)
    }

    /// Takes in `peer`, which calls itself `name`, if it has the secret.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn enrol(&self, peer: Peer, name: &str, secret: &[u8]) -> Result<(), Refusal> {
        let mut invitation = self.invitation();
        if !self.open.load(Ordering::Acquire) {
            return Err(Refusal::Closed);
        }
        if invitation.secret != secret {
            invitation.wrong += 1;
            self.note_wrong(invitation.wrong, peer.address);
            return Err(Refusal::Wrong);
        }
        let kept = self.known.borrowers().and_then(|mut borrowers| {
            borrowers.insert(peer.key.to_string(), name.to_owned());
            self.known.keep_borrowers(borrowers)
        });
        if let Err(error) = kept {
            let problem = prima_crds::error_chain(&error);
            tracing::error!(problem, "cannot remember a borrower");
            return Err(Refusal::NotKept);
        }
        self.pins.add([peer.key]);
        self.open.store(false, Ordering::Release);
        tracing::info!(name, address = %peer.address, "knows a new borrower; the word is used");
        Ok(())
    }

    fn note_wrong(&self, wrong: u32, address: IpAddr) {
        tracing::warn!(%address, "somebody came with a wrong word ({wrong} of {MAX_WRONG})");
        if wrong >= MAX_WRONG {
            self.open.store(false, Ordering::Release);
            tracing::error!(
                "the word was guessed at too often, and is void; those who are known already are let in. `prima agent --enrol` shows another word"
            );
        }
    }

    fn invitation(&self) -> MutexGuard<'_, Invitation> {
        self.invitation
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn peer(number: u8) -> Peer {
        Peer {
            key: Fingerprint::of(&[number]),
            address: Ipv4Addr::new(192, 168, 1, number).into(),
        }
    }

    fn door(folder: &tempfile::TempDir) -> Door {
        opened(folder, false)
    }

    fn opened(folder: &tempfile::TempDir, enrol: bool) -> Door {
        Door::new(Known::at(folder.path().to_owned()).unwrap(), enrol).unwrap()
    }

    #[test]
    fn a_word_lets_one_in_who_stays_known() {
        let folder = tempfile::tempdir().unwrap();
        let first = door(&folder);
        let secret = first.secret().unwrap();
        assert!(!first.knows(&peer(1).key));
        assert_eq!(first.enrol(peer(1), "laptop", &[0; 4]), Err(Refusal::Wrong));
        assert_eq!(first.enrol(peer(1), "laptop", &secret), Ok(()));
        assert!(first.knows(&peer(1).key));
        assert_eq!(first.enrol(peer(2), "other", &secret), Err(Refusal::Closed));

        let next = door(&folder);
        assert!(next.knows(&peer(1).key) && !next.knows(&peer(2).key));
        assert_eq!(next.known().unwrap(), ["laptop"]);
        assert_eq!(next.secret(), None);
        assert_eq!(next.enrol(peer(2), "other", &secret), Err(Refusal::Closed));

        let asked = opened(&folder, true);
        assert_eq!(asked.enrol(peer(2), "other", &secret), Err(Refusal::Wrong));
        let secret = asked.secret().unwrap();
        assert_eq!(asked.enrol(peer(2), "other", &secret), Ok(()));
        assert!(asked.knows(&peer(1).key) && asked.knows(&peer(2).key));
    }

    #[test]
    fn who_guesses_closes_the_door_also_for_the_right_word() {
        let folder = tempfile::tempdir().unwrap();
        let door = door(&folder);
        let secret = door.secret().unwrap();
        for guess in 0..MAX_WRONG {
            let wrong = [guess as u8, 1, 2, 3, 4];
            assert_eq!(door.enrol(peer(9), "guesser", &wrong), Err(Refusal::Wrong));
        }
        assert_eq!(door.enrol(peer(1), "laptop", &secret), Err(Refusal::Closed));
        assert!(door.known().unwrap().is_empty());
    }
}
