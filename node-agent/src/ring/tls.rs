//! TLS 1.3 between machines, mutual, with raw public keys (RFC 7250) that both sides know beforehand by their fingerprints. There is no
//! certificate: nothing expires, so clocks may be wrong, and nobody has to sign.
//!
//! Decides who gets a connection: whoever proves to have one of the expected keys. Refuses everybody else before a byte of HTTP/2 is read,
//! without saying what was expected. What somebody may do with a connection is decided in `transport` and `link`.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, DistinguishedName, Error,
    OtherError, ServerConfig, SignatureScheme, version,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::server::Connected;

use super::connection;
use super::identity::{Fingerprint, FingerprintStart, Identity};

/// Whose keys are let in. Clones share one list, which may change.
#[derive(Clone, Debug, Default)]
pub struct Pins(Arc<RwLock<BTreeSet<Fingerprint>>>);

impl Pins {
    /// Connections that are there already stay.
    pub fn set(&self, keys: impl IntoIterator<Item = Fingerprint>) {
        let keys = keys.into_iter().collect();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    pub fn add(&self, keys: impl IntoIterator<Item = Fingerprint>) {
        let mut pinned = self.0.write().unwrap_or_else(PoisonError::into_inner);
        pinned.extend(keys);
    }

    pub fn contains(&self, key: &Fingerprint) -> bool {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        keys.contains(key)
    }
}

impl From<Fingerprint> for Pins {
    fn from(key: Fingerprint) -> Self {
        let pins = Self::default();
        pins.set([key]);
        pins
    }
}

/// Whose keys a handshake accepts.
#[derive(Clone, Debug)]
pub enum Accepted {
    Pinned(Pins),
    /// Whoever has a key that begins so: what an enrolment word says of it.
    BeginsWith(FingerprintStart),
    /// Pinned ones, and while this is true, all others, who have proven nothing yet.
    OrAnybodyWhile(Pins, Arc<AtomicBool>),
}

impl Accepted {
    fn contains(&self, key: &Fingerprint) -> bool {
        match self {
            Self::Pinned(pins) => pins.contains(key),
            Self::BeginsWith(start) => key.start() == *start,
            Self::OrAnybodyWhile(pins, open) => open.load(Ordering::Acquire) || pins.contains(key),
        }
    }
}

impl From<Pins> for Accepted {
    fn from(pins: Pins) -> Self {
        Self::Pinned(pins)
    }
}

impl From<Fingerprint> for Accepted {
    fn from(key: Fingerprint) -> Self {
        Self::Pinned(key.into())
    }
}

impl From<FingerprintStart> for Accepted {
    fn from(start: FingerprintStart) -> Self {
        Self::BeginsWith(start)
    }
}

/// This machine's key, as it is now.
pub type OwnKey = watch::Receiver<Arc<Identity>>;

/// A key that stays.
pub fn fixed(identity: Identity) -> OwnKey {
    watch::channel(Arc::new(identity)).1
}

/// A handshake takes two trips and a millisecond of computing.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Strangers may begin this many handshakes at once; then the oldest gives way.
const MAX_HANDSHAKES: usize = 64;
/// Where a connection cannot be accepted (too many open files), the next try comes after this.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const ALPN: &[u8] = b"h2";

/// Who may connect, and the key that is shown to them.
///
/// # Errors
/// Not with the cipher suites of `provider`.
pub fn server_config(
    own: OwnKey,
    accepted: impl Into<Accepted>,
) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(provider());
    let verifier = Arc::new(PinnedKey::new(accepted.into(), &provider));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(Own(own)));
    // A resumed session would not be verified again.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// How to connect to the machine that has the key `server`.
///
/// # Errors
/// Not with the cipher suites of `provider`.
pub fn connector(own: OwnKey, server: impl Into<Accepted>) -> Result<Connector, Error> {
    let provider = Arc::new(provider());
    let verifier = Arc::new(PinnedKey::new(server.into(), &provider));
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(Arc::new(Own(own)));
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Connector(Arc::new(config)))
}

/// TLS 1.3 only. A processor without instructions for AES (a Raspberry Pi 4) asks for ChaCha20, which it computes several times as fast;
/// who has them takes that, too.
fn provider() -> CryptoProvider {
    let mut provider = rustls::crypto::ring::default_provider();
    let aes = aes_in_hardware();
    provider.cipher_suites.retain(|suite| match suite.suite() {
        CipherSuite::TLS13_CHACHA20_POLY1305_SHA256 => true,
        CipherSuite::TLS13_AES_128_GCM_SHA256 => aes,
        _ => false,
    });
    // What comes first is preferred.
    let is_chacha = |suite| suite == CipherSuite::TLS13_CHACHA20_POLY1305_SHA256;
    provider
        .cipher_suites
        .sort_by_key(|suite| is_chacha(suite.suite()));
    provider
}

#[cfg(target_arch = "x86_64")]
fn aes_in_hardware() -> bool {
    is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "aarch64")]
fn aes_in_hardware() -> bool {
    // Rust's feature has both AES and PMULL.
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn aes_in_hardware() -> bool {
    false
}

/// Accepts who has an accepted key, both as a server and as a client.
#[derive(Debug)]
struct PinnedKey {
    accepted: Accepted,
    provider: Arc<CryptoProvider>,
}

#[derive(Debug, thiserror::Error)]
#[error("whoever answers there has another key than expected")]
struct OtherKey;

/// Whether connecting failed because whoever answered has no accepted key.
pub fn is_other_key(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        // An I/O error is what it wraps, and names only the cause of that as its own.
        let error = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref)
            .map_or(error, |inner| inner as &(dyn std::error::Error + 'static));
        if let Some(Error::InvalidCertificate(CertificateError::Other(OtherError(other)))) =
            error.downcast_ref()
        {
            return other.is::<OtherKey>();
        }
        next = error.source();
    }
    false
}

impl PinnedKey {
    fn new(accepted: Accepted, provider: &Arc<CryptoProvider>) -> Self {
        Self {
            accepted,
            provider: provider.clone(),
        }
    }

    fn check(&self, public_key: &[u8]) -> Result<(), Error> {
        match self.accepted.contains(&Fingerprint::of(public_key)) {
            true => Ok(()),
            false => {
                let other = CertificateError::Other(OtherError(Arc::new(OtherKey)));
                Err(Error::InvalidCertificate(other))
            }
        }
    }

    /// Whether the other side has the private key, too.
    fn check_signature(
        &self,
        message: &[u8],
        public_key: &[u8],
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let public_key = SubjectPublicKeyInfoDer::from(public_key);
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &public_key, signature, algorithms)
    }
}

/// What a handshake of TLS 1.2 would ask; there is none.
fn no_tls12() -> Error {
    Error::General("only TLS 1.3 is spoken here".to_owned())
}

impl ServerCertVerifier for PinnedKey {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for PinnedKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// Shows the machine's key, whatever the other side asks for.
#[derive(Debug)]
struct Own(OwnKey);

impl Own {
    fn key(&self) -> Arc<CertifiedKey> {
        self.0.borrow().key().clone()
    }
}

impl ResolvesServerCert for Own {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.key())
    }

    fn only_raw_public_keys(&self) -> bool {
        true
    }
}

impl ResolvesClientCert for Own {
    fn resolve(
        &self,
        _root_hint_subjects: &[&[u8]],
        _sigschemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        Some(self.key())
    }

    fn only_raw_public_keys(&self) -> bool {
        true
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Opens connections for tonic.
#[derive(Clone)]
pub struct Connector(Arc<ClientConfig>);

impl Service<Uri> for Connector {
    type Response = TokioIo<client::TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = TlsConnector::from(self.0.clone());
        Box::pin(async move {
            let address = uri.authority().map_or("", |authority| authority.as_str());
            let stream = TcpStream::connect(address).await?;
            connection::set_up(&stream)?;
            // The key says who it is; the name is not looked at.
            let name = ServerName::from(stream.peer_addr()?.ip());
            let stream = timeout(HANDSHAKE_LIMIT, connector.connect(name, stream));
            Ok(TokioIo::new(stream.await??))
        })
    }
}

/// A connection of somebody who has an accepted key.
pub struct Proven {
    stream: server::TlsStream<TcpStream>,
    peer: Peer,
    limit: Option<Limit>,
}

/// Until when a connection may last, and which of few places it takes.
struct Limit {
    end: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Proven {
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// The connection, for no longer than `time`.
    pub fn limited(self, time: Duration, place: OwnedSemaphorePermit) -> Self {
        Self {
            limit: Some(Limit {
                end: Box::pin(sleep(time)),
                _place: place,
            }),
            ..self
        }
    }
}

/// Who is at the other end: an extension of every request that comes over the connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    pub key: Fingerprint,
    pub address: IpAddr,
}

/// The connections of those who have proven to have an accepted key. Ends when it is dropped.
pub fn incoming(
    listener: TcpListener,
    config: Arc<ServerConfig>,
) -> ReceiverStream<io::Result<Proven>> {
    let (proven, connections) = mpsc::channel(1);
    tokio::spawn(accept(listener, config.into(), proven));
    ReceiverStream::new(connections)
}

async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    proven: mpsc::Sender<io::Result<Proven>>,
) {
    let mut handshakes = JoinSet::new();
    let mut oldest = VecDeque::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    let handshake = timeout(HANDSHAKE_LIMIT, prove(acceptor.clone(), stream));
                    oldest.push_back(handshakes.spawn(handshake));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(done) = handshakes.join_next() => {
                // Strangers come and go; whoever should be let in learns on its own side why it was not.
                if let Ok(Ok(Ok(connection))) = done
                    && proven.send(Ok(connection)).await.is_err()
                {
                    return;
                }
            }
            () = proven.closed() => return,
        }
        oldest.retain(|handshake: &tokio::task::AbortHandle| !handshake.is_finished());
        if oldest.len() > MAX_HANDSHAKES
            && let Some(oldest) = oldest.pop_front()
        {
            oldest.abort();
        }
    }
}

async fn prove(acceptor: TlsAcceptor, stream: TcpStream) -> io::Result<Proven> {
    connection::set_up(&stream)?;
    let address = stream.peer_addr()?.ip();
    let stream = acceptor.accept(stream).await?;
    // The handshake has verified it.
    let key = stream
        .get_ref()
        .1
        .peer_certificates()
        .and_then(<[_]>::first);
    let key = key.map(|key| Fingerprint::of(key));
    let key = key.ok_or_else(|| io::Error::other("the handshake left no key"))?;
    Ok(Proven {
        stream,
        peer: Peer { key, address },
        limit: None,
    })
}

impl Connected for Proven {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer
    }
}

impl AsyncRead for Proven {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(limit) = &mut self.limit
            && limit.end.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Proven {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
