//! The HTTP client of all fetches: which servers it trusts, which it may ask ([`crate::Reach`]), and what it does not do by itself.
//!
//! Decides: public certificate authorities are built in; those of the system, or of the file that SSL_CERT_FILE names, are trusted,
//! too, so that a mirror at home can have its own certificate. Refuses: to follow redirects, since [`crate::Remote`] decides on them.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Url;
use reqwest::redirect::Policy;
use rustls::{ClientConfig, RootCertStore};

use crate::reach::{OutOfReach, Reach};
use crate::retry::Retry;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// A body is given up when nothing of it comes for this long.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Connections that all fetches of a process share.
#[derive(Debug, Clone)]
pub struct Client {
    /// For servers that the installation names.
    named: reqwest::Client,
    /// For all others. Without a proxy, which would look their names up by itself.
    others: reqwest::Client,
    reach: Reach,
    pub(crate) retry: Retry,
}

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("cannot set up TLS")]
    Tls { source: rustls::Error },
    #[error("cannot set up the HTTP client")]
    Http { source: reqwest::Error },
}

impl Client {
    /// A client that asks servers within `reach`, and tries again as `retry` says.
    ///
    /// # Errors
    /// [`ClientError`] when TLS or HTTP cannot be set up.
    pub fn new(retry: Retry, reach: Reach) -> Result<Client, ClientError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|source| ClientError::Tls { source })?
            .with_root_certificates(roots())
            .with_no_client_auth();
        let http = || {
            reqwest::Client::builder()
                .tls_backend_preconfigured(tls.clone())
                .redirect(Policy::none())
                .connect_timeout(CONNECT_TIMEOUT)
                .read_timeout(READ_TIMEOUT)
                .user_agent(concat!("prima/", env!("CARGO_PKG_VERSION")))
        };
        let failed = |source| ClientError::Http { source };
        let guarded = http().no_proxy().dns_resolver(Arc::new(reach.clone()));
        Ok(Client {
            named: http().build().map_err(failed)?,
            others: guarded.build().map_err(failed)?,
            reach,
            retry,
        })
    }

    /// What asks the server of `url`.
    pub(crate) fn http(&self, url: &Url) -> Result<&reqwest::Client, OutOfReach> {
        match self.reach.names(url)? {
            true => Ok(&self.named),
            false => Ok(&self.others),
        }
    }
}

fn roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    let native = rustls_native_certs::load_native_certs();
    for error in &native.errors {
        tracing::warn!(%error, "cannot read a certificate authority");
    }
    roots.add_parsable_certificates(native.certs);
    roots
}
