//! A mirror at home has a certificate of an authority of its own: it is trusted where SSL_CERT_FILE says so, and only there. A certificate of
//! another time may be the fault of this machine's clock.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use prima_crds::error_chain;
use prima_weights::{Client, Location, Reach, Remote, Source};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::support::{FILE, REPO, Setup, quick};

const ADDRESS: &str = "PRIMA_TEST_ADDRESS";

/// Opens a file; the authorities that it trusts are those of its environment.
#[tokio::test]
#[ignore = "started by the test below"]
async fn opener() {
    let url = std::env::var(ADDRESS).expect("started by the test below");
    let source = Source {
        location: Location::Url { url, sha256: None },
        token: None,
    };
    let client = Client::new(quick(), Reach::anywhere()).unwrap();
    match Remote::open(&client, &source).await {
        Ok(remote) => println!("\nopened {}", remote.identity().size_bytes),
        Err(error) => println!(
            "\nrefused {} transient {}",
            error_chain(&error),
            error.is_transient()
        ),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_authority_in_ssl_cert_file_is_trusted() {
    let setup = Setup::new().await;
    let (authority, bundle) = authority(&setup);
    let url = mirror(&setup, &authority, certificate()).await;
    let trusted = open(&url, Some(&bundle));
    assert!(
        trusted.contains(&format!("opened {}", setup.model.len())),
        "{trusted}"
    );
    let unknown = open(&url, None);
    for part in [
        "refused",
        "UnknownIssuer",
        "SSL_CERT_FILE",
        "transient false",
    ] {
        assert!(unknown.contains(part), "{part:?} in {unknown:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_of_another_time_may_be_the_clocks_fault() {
    let setup = Setup::new().await;
    let (authority, bundle) = authority(&setup);
    let mut of_the_future = certificate();
    of_the_future.not_before = rcgen::date_time_ymd(4000, 1, 1);
    let mut of_the_past = certificate();
    of_the_past.not_after = rcgen::date_time_ymd(2000, 1, 1);
    for certificate in [of_the_future, of_the_past] {
        let url = mirror(&setup, &authority, certificate).await;
        let refused = open(&url, Some(&bundle));
        // At once: after tries, it would be another error.
        for part in ["refused", "set the clock", "transient true"] {
            assert!(refused.contains(part), "{part:?} in {refused:?}");
        }
    }
}

/// What the opener says of the file at `url`, if it trusts the authorities in `bundle`.
fn open(url: &str, bundle: Option<&Path>) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "tls::opener", "--ignored", "--nocapture"])
        .env(ADDRESS, url)
        .env_remove("SSL_CERT_FILE");
    if let Some(bundle) = bundle {
        command.env("SSL_CERT_FILE", bundle);
    }
    let output = command.stderr(Stdio::inherit()).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// An authority, and the file that names it.
fn authority(setup: &Setup) -> (Issuer<'static, KeyPair>, PathBuf) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap();
    let bundle = setup.path("authority.pem");
    std::fs::write(&bundle, authority.pem()).unwrap();
    (Issuer::new(params, key), bundle)
}

/// A certificate for localhost, to be signed.
fn certificate() -> CertificateParams {
    CertificateParams::new(vec!["localhost".to_owned()]).unwrap()
}

/// The address of the model at the hub again, over TLS with this certificate of `authority`.
async fn mirror(
    setup: &Setup,
    authority: &Issuer<'static, KeyPair>,
    certificate: CertificateParams,
) -> String {
    let endpoint = setup.hub.endpoint();
    let hub: SocketAddr = endpoint.trim_start_matches("http://").parse().unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = certificate.signed_by(&key, authority).unwrap();
    let config =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::Pkcs8(key.serialize_der().into()),
            )
            .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                // A client that does not trust the certificate hangs up here.
                let Ok(mut client) = acceptor.accept(client).await else {
                    return;
                };
                let mut hub = TcpStream::connect(hub).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut client, &mut hub).await;
            });
        }
    });
    format!("https://localhost:{port}/_files/{REPO}/{FILE}")
}
