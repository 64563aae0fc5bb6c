//! The key by which a machine's agent is known to others, and its fingerprint.
//!
//! Decides how a key is made, kept and named. Who is let in with which key is decided in `tls`.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::crypto::ring::sign::any_eddsa_type;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use sha2::{Digest as _, Sha256};

/// SHA-256 of a public key: of the DER of its SubjectPublicKeyInfo (RFC 5280, section 4.1), which is what TLS carries of a raw public key
/// (RFC 7250). Documents have it as 64 hexadecimal digits in lower case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fingerprint([u8; 32]);

/// How a fingerprint begins. To find another key whose fingerprint begins so takes 2^80 tries.
pub type FingerprintStart = [u8; 10];

impl Fingerprint {
    /// Of a SubjectPublicKeyInfo.
    pub fn of(public_key: &[u8]) -> Self {
        Self(Sha256::digest(public_key).into())
    }

    /// The fingerprint with these bytes.
    ///
    /// # Errors
    /// If there are not 32.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, NoFingerprint> {
        bytes.try_into().map(Self).map_err(|_| NoFingerprint)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn start(&self) -> FingerprintStart {
        std::array::from_fn(|at| self.0[at])
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected 64 hexadecimal digits, the SHA-256 of a public key")]
pub struct NoFingerprint;

impl FromStr for Fingerprint {
    type Err = NoFingerprint;

    fn from_str(text: &str) -> Result<Self, NoFingerprint> {
        let mut bytes = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return Err(NoFingerprint);
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digit = |digit: u8| char::from(digit).to_digit(16).ok_or(NoFingerprint);
            *byte = (digit(digits[0])? * 16 + digit(digits[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

/// A private key (Ed25519), and the fingerprint of its public key.
#[derive(Clone, Debug)]
pub struct Identity {
    key: Arc<CertifiedKey>,
    fingerprint: Fingerprint,
}

#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("cannot read the agent's key {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot keep the agent's key in {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is no key of an agent; delete it, and the agent makes another", path.display())]
    Damaged { path: PathBuf },
    #[error("{} can be read by other users: it is no secret any more; delete it, and the agent makes another", path.display())]
    Exposed { path: PathBuf },
    #[error("the system gave no random numbers for a key")]
    Random,
}

/// A key takes 85 bytes.
const MAX_FILE_BYTES: u64 = 1 << 10;

impl Identity {
    /// A new key, and its PKCS #8 document.
    ///
    /// # Errors
    /// [`IdentityError::Random`].
    pub fn generate() -> Result<(Self, Vec<u8>), IdentityError> {
        let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new());
        let document = document.map_err(|_| IdentityError::Random)?;
        let identity = Self::from_pkcs8(document.as_ref()).ok_or(IdentityError::Random)?;
        Ok((identity, document.as_ref().to_vec()))
    }

    fn from_pkcs8(document: &[u8]) -> Option<Self> {
        let key = any_eddsa_type(&PrivatePkcs8KeyDer::from(document)).ok()?;
        let public_key = CertificateDer::from(key.public_key()?.to_vec());
        Some(Self {
            fingerprint: Fingerprint::of(&public_key),
            key: Arc::new(CertifiedKey::new(vec![public_key], key)),
        })
    }

    /// The key in the file `path`.
    ///
    /// # Errors
    /// When the file cannot be read, holds no key, or can be read by others than its owner.
    pub fn load(path: &Path) -> Result<Self, IdentityError> {
        let failed = |source| IdentityError::Read {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(IdentityError::Exposed {
                path: path.to_owned(),
            });
        }
        let mut document = Vec::new();
        file.take(MAX_FILE_BYTES)
            .read_to_end(&mut document)
            .map_err(failed)?;
        Self::from_pkcs8(&document).ok_or_else(|| IdentityError::Damaged {
            path: path.to_owned(),
        })
    }

    /// The key in the file `path`; a new one if there is none, or one that is of no use any more.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn load_or_create(path: &Path) -> Result<Self, IdentityError> {
        match Self::load(path) {
            Ok(identity) => return Ok(identity),
            Err(IdentityError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            }
            Err(error @ (IdentityError::Damaged { .. } | IdentityError::Exposed { .. })) => {
                tracing::warn!(
                    problem = prima_crds::error_chain(&error),
                    "making another key"
                );
            }
            Err(error) => return Err(error),
        }
        let (identity, document) = Self::generate()?;
        write(path, &document).map_err(|source| IdentityError::Write {
            path: path.to_owned(),
            source,
        })?;
        tracing::info!(path = %path.display(), fingerprint = %identity.fingerprint, "made a key");
        Ok(identity)
    }

    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// What TLS shows to others, and signs with.
    pub(super) fn key(&self) -> &Arc<CertifiedKey> {
        &self.key
    }
}

/// For its owner only, and whole or not at all.
fn write(path: &Path, document: &[u8]) -> io::Result<()> {
    let unfinished = path.with_extension("unfinished");
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut options = OpenOptions::new();
    let options = options.write(true).create_new(true).mode(0o600);
    let mut file = options.open(&unfinished)?;
    file.write_all(document)?;
    file.sync_all()?;
    fs::rename(&unfinished, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_key_is_made_once_and_for_its_owner_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity.key");
        let made = Identity::load_or_create(&path).unwrap().fingerprint();
        assert_eq!(mode(&path), 0o600);
        assert_eq!(Identity::load_or_create(&path).unwrap().fingerprint(), made);
        assert_eq!(Identity::load(&path).unwrap().fingerprint(), made);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

        fs::remove_file(&path).unwrap();
        assert_ne!(Identity::load_or_create(&path).unwrap().fingerprint(), made);
    }

    #[test]
    fn a_damaged_or_exposed_key_is_refused_or_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity.key");
        let missing = Identity::load(&path);
        assert!(matches!(missing, Err(IdentityError::Read { .. })));

        let made = Identity::load_or_create(&path).unwrap().fingerprint();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let exposed = Identity::load(&path).unwrap_err().to_string();
        assert!(
            exposed.contains("identity.key") && exposed.contains("delete it"),
            "{exposed}"
        );
        let second = Identity::load_or_create(&path).unwrap().fingerprint();
        assert_ne!(second, made);
        assert_eq!(mode(&path), 0o600);

        for damage in [&b""[..], b"MC4CAQ", &[0x30; 5000]] {
            fs::write(&path, damage).unwrap();
            let damaged = Identity::load(&path);
            assert!(matches!(damaged, Err(IdentityError::Damaged { .. })));
        }
        Identity::load_or_create(&path).unwrap();
        Identity::load(&path).unwrap();
    }

    #[test]
    fn a_fingerprint_is_the_sha_256_of_the_subject_public_key_info() {
        let (identity, document) = Identity::generate().unwrap();
        let public_key = &identity.key.cert[0];
        // RFC 8410: SEQUENCE { SEQUENCE { OID 1.3.101.112 } BIT STRING of 32 bytes }.
        let (head, bits) = public_key.split_at(12);
        assert_eq!(head, [0x30, 42, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 33, 0]);
        // The document has the public key, too, at its end.
        assert!(document.ends_with(bits));
        let text = identity.fingerprint().to_string();
        assert_eq!(text.parse(), Ok(Fingerprint::of(public_key)));
        for bad in ["", &text[1..], &"g".repeat(64), &"é".repeat(32)] {
            assert_eq!(bad.parse::<Fingerprint>(), Err(NoFingerprint), "{bad}");
        }
    }
}
