//! How an API server and its clients prove who they are: certificates, a key for service accounts' tokens, and one account per component.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// The first address of the Services, which is the API server's own.
const SERVICE_ADDRESS: &str = "10.96.0.1";

pub(crate) struct Credentials {
    folder: PathBuf,
}

/// Someone whom the API server knows by a token.
pub(crate) struct Account {
    pub(crate) user: String,
    groups: &'static str,
}

impl Account {
    pub(crate) fn admin() -> Account {
        Account {
            user: "admin".into(),
            groups: "system:masters",
        }
    }

    /// A part of the control plane, or kube-proxy; Kubernetes knows by its name what it may do.
    pub(crate) fn component(name: &str) -> Account {
        Account {
            user: format!("system:{name}"),
            groups: "",
        }
    }

    pub(crate) fn kubelet(node: &str) -> Account {
        Account {
            user: format!("system:node:{node}"),
            groups: "system:nodes",
        }
    }

    pub(crate) fn token(&self) -> String {
        format!("token-of-{}", self.user.replace(':', "-"))
    }
}

impl Credentials {
    /// Written to `folder`, for a server at `address`.
    pub(crate) fn create(folder: &Path, address: Ipv4Addr, accounts: &[Account]) -> Credentials {
        let credentials = Credentials {
            folder: folder.to_owned(),
        };
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        authority
            .distinguished_name
            .push(DnType::CommonName, "the authority of a test");
        let authority = CertifiedIssuer::self_signed(authority, new_key()).expect("a certificate");
        credentials.write("ca.crt", &authority.pem());

        let names = [
            &address.to_string(),
            SERVICE_ADDRESS,
            "kubernetes.default.svc",
        ];
        let mut server = CertificateParams::new(names.map(str::to_owned)).expect("valid names");
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        credentials.issue("server", &server, &authority);

        // Kubelets let in clients that their authority signed for, as administrators.
        let mut client = CertificateParams::default();
        client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        client
            .distinguished_name
            .push(DnType::CommonName, "kube-apiserver");
        client
            .distinguished_name
            .push(DnType::OrganizationName, "system:masters");
        credentials.issue("kubelet-client", &client, &authority);

        let service_accounts = new_key();
        credentials.write("service-accounts.key", &service_accounts.serialize_pem());
        credentials.write("service-accounts.pub", &service_accounts.public_key_pem());
        let lines = accounts.iter().map(|account| {
            let (token, user, groups) = (account.token(), &account.user, account.groups);
            format!("{token},{user},{user},\"{groups}\"\n")
        });
        credentials.write("tokens.csv", &lines.collect::<String>());
        credentials
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// For clients of the server in this process.
    pub(crate) fn client(&self) -> ClientConfig {
        let authority = CertificateDer::from_pem_file(self.path("ca.crt"));
        let mut trusted = RootCertStore::empty();
        let authority = authority.expect("the authority's certificate");
        trusted.add(authority).expect("an authority");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions of TLS")
            .with_root_certificates(trusted)
            .with_no_client_auth()
    }

    fn issue(
        &self,
        name: &str,
        params: &CertificateParams,
        authority: &CertifiedIssuer<'_, KeyPair>,
    ) {
        let key = new_key();
        let certificate = params.signed_by(&key, authority).expect("a certificate");
        self.write(&format!("{name}.crt"), &certificate.pem());
        self.write(&format!("{name}.key"), &key.serialize_pem());
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::write(&path, text)
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
    }
}

fn new_key() -> KeyPair {
    KeyPair::generate().expect("a key")
}
