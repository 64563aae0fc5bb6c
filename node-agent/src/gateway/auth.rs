//! Who may call: API keys, web origins (CORS) and, against DNS rebinding, host names. It never logs a key. [`KeyAccount`] says what a key
//! may use.

use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use http_body::Body as _;
use prima_crds::v1alpha1::api_keys::ApiKeys;
use tokio::sync::watch;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer, ExposeHeaders};

use super::key_account::{FIXED, KeyAccount, KeyAccounts};
use super::openai_error::ApiError;
use super::{Gateway, GatewayError, GatewayOptions, request_id};

/// Bounds the work of comparing.
pub const MAX_KEY_BYTES: usize = 512;

/// The checked form of the access options.
pub struct Access {
    /// Of the command line and the plan: SHA-256 of each.
    fixed: Vec<String>,
    /// Others, which come and go. Where they are, a key is asked for, even if there is none.
    named: Option<watch::Receiver<ApiKeys>>,
    accounts: KeyAccounts,
    origins: Origins,
    /// Only loopback without keys is open to a page that rebinds its own name to 127.0.0.1. With keys, such a page
    /// knows none; on other addresses, we cannot know the names under which people reach the server.
    check_host: bool,
}

/// Whose request it is, for the routes behind [`require_key`].
#[derive(Clone)]
pub struct Caller {
    /// A number of its key's own; 0 where no key is asked for.
    pub keyspace: u64,
    /// Its key where one is asked for, else its address.
    pub client: u64,
    /// Of its key, where one is asked for.
    pub account: Option<Arc<KeyAccount>>,
}

enum Origins {
    Any,
    /// These, and pages served from localhost. A server's own page needs no permission.
    Listed(Vec<String>),
}

impl Access {
    pub fn new(options: &GatewayOptions, on_loopback: bool) -> Result<Self, GatewayError> {
        let usable = |key: &String| {
            (1..=MAX_KEY_BYTES).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic())
        };
        if let Some(position) = options.api_keys.iter().position(|key| !usable(key)) {
            return Err(GatewayError::ApiKey {
                number: position + 1,
            });
        }
        let given = options.api_keys.iter();
        let given = given.map(|key| ApiKeys::digest("", key.as_bytes()));
        let planned = options.api_key_sha256.iter();
        let planned = planned.map(|digest| digest.to_ascii_lowercase());
        let fixed: Vec<String> = given.chain(planned).collect();
        let origins = if options.cors_origins.iter().any(|origin| origin == "*") {
            Origins::Any
        } else {
            let listed = options.cors_origins.iter().map(|text| {
                normal_origin(text).ok_or_else(|| GatewayError::CorsOrigin {
                    origin: text.clone(),
                })
            });
            Origins::Listed(listed.collect::<Result<_, _>>()?)
        };
        Ok(Self {
            check_host: on_loopback && fixed.is_empty() && options.named_api_keys.is_none(),
            fixed,
            named: options.named_api_keys.clone(),
            accounts: KeyAccounts::default(),
            origins,
        })
    }

    /// What a browser is told. The headers of a preflight are mirrored because `*` does not cover `Authorization`.
    pub fn cors(&self) -> CorsLayer {
        let origins = match &self.origins {
            Origins::Any => AllowOrigin::any(),
            Origins::Listed(listed) => {
                let listed = listed.clone();
                AllowOrigin::predicate(move |origin: &HeaderValue, _| {
                    origin.to_str().is_ok_and(|origin| {
                        host_of_origin(origin).is_some_and(|host| is_localhost(&host))
                            || normal_origin(origin).is_some_and(|origin| listed.contains(&origin))
                    })
                })
            }
        };
        CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(AllowHeaders::mirror_request())
            .expose_headers(ExposeHeaders::list([
                request_id::HEADER.clone(),
                header::RETRY_AFTER,
            ]))
    }

    /// What the keys have used.
    pub fn accounts(&self) -> &KeyAccounts {
        &self.accounts
    }

    /// The account of the key that was sent, and a number of the key's own; `None` where none is asked for.
    fn check_key(&self, headers: &HeaderMap) -> Result<Option<(Arc<KeyAccount>, u64)>, ApiError> {
        if self.fixed.is_empty() && self.named.is_none() {
            return Ok(None);
        }
        let sent = sent_key(headers).ok_or(ApiError::NoKey)?;
        let digest = ApiKeys::digest("", sent);
        if let Some(position) = position_of(&digest, self.fixed.iter()) {
            let name = format!("{FIXED}{}", position + 1);
            return Ok(Some((self.accounts.of(&name, None), number_of(digest))));
        }
        let named = self.named.as_ref().ok_or(ApiError::WrongKey)?.borrow();
        let digest = ApiKeys::digest(&named.salt, sent);
        let position = position_of(&digest, named.sha256.values());
        let name = position.and_then(|position| named.sha256.keys().nth(position));
        let account = self
            .accounts
            .of(name.ok_or(ApiError::WrongKey)?, Some(&named));
        Ok(Some((account, number_of(digest))))
    }

    fn check_host(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if !self.check_host {
            return Ok(());
        }
        // A client without a Host header is no browser.
        let Some(host) = headers
            .get(header::HOST)
            .and_then(|host| host.to_str().ok())
        else {
            return Ok(());
        };
        let name = host_of_origin(&format!("http://{host}"));
        let known = name.is_some_and(|name| {
            is_localhost(&name)
                || name.parse::<IpAddr>().is_ok()
                || match &self.origins {
                    Origins::Any => true,
                    Origins::Listed(listed) => listed
                        .iter()
                        .any(|origin| host_of_origin(origin).as_deref() == Some(&name)),
                }
        });
        if known {
            Ok(())
        } else {
            Err(ApiError::UnknownHost { host: host.into() })
        }
    }
}

pub async fn require_key(
    State(gateway): State<Gateway>,
    mut request: Request,
    next: Next,
) -> Response {
    let caller = match gateway.0.access.check_key(request.headers()) {
        Err(error) => {
            let mut refusal = super::refusal(request.uri().path(), error);
            // The body is not read, so the connection ends: a client that is not told would send its next request there.
            if !request.body().is_end_stream() {
                let close = HeaderValue::from_static("close");
                refusal.headers_mut().insert(header::CONNECTION, close);
            }
            return refusal;
        }
        Ok(Some((account, number))) => {
            account.count_request();
            Caller {
                keyspace: number,
                client: number,
                account: Some(account),
            }
        }
        Ok(None) => {
            let address = request.extensions().get::<ConnectInfo<SocketAddr>>();
            Caller {
                keyspace: 0,
                client: address.map_or(0, |ConnectInfo(address)| number_of(address.ip())),
                account: None,
            }
        }
    };
    request.extensions_mut().insert(caller);
    next.run(request).await
}

pub async fn require_known_host(
    State(gateway): State<Gateway>,
    request: Request,
    next: Next,
) -> Response {
    match gateway.0.access.check_host(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => super::refusal(request.uri().path(), error),
    }
}

/// The same for the same client, and not 0.
fn number_of(client: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    client.hash(&mut hasher);
    hasher.finish().max(1)
}

fn sent_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        scheme
            .eq_ignore_ascii_case("bearer")
            .then_some(key.trim().as_bytes())
    });
    bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))
}

/// Which of `digests` this one is, the last if there are several. All are compared, even after a match.
fn position_of<'a>(digest: &str, digests: impl Iterator<Item = &'a String>) -> Option<usize> {
    digests.enumerate().fold(
        None,
        |known, (position, other)| match equal_in_constant_time(digest, other) {
            true => Some(position),
            false => known,
        },
    )
}

/// Takes the same time however much two texts of one length differ.
fn equal_in_constant_time(a: &str, b: &str) -> bool {
    let pairs = a.bytes().zip(b.bytes());
    let difference = pairs.fold(0u8, |difference, (a, b)| {
        std::hint::black_box(difference | (a ^ b))
    });
    a.len() == b.len() && difference == 0
}

/// `scheme://host[:port]` in lower case, as browsers write origins; `None` for anything else.
fn normal_origin(text: &str) -> Option<String> {
    let uri: Uri = text.parse().ok()?;
    let (scheme, authority) = (uri.scheme_str()?, uri.authority()?);
    let only_an_origin = uri.path() == "/" && uri.query().is_none() && !text.contains('@');
    only_an_origin.then(|| format!("{scheme}://{authority}").to_ascii_lowercase())
}

/// The host of an origin in lower case, without port and without the brackets of an IPv6 address.
fn host_of_origin(origin: &str) -> Option<String> {
    let uri: Uri = origin.parse().ok()?;
    let host = uri.host()?.trim_start_matches('[').trim_end_matches(']');
    Some(host.to_ascii_lowercase())
}

fn is_localhost(host: &str) -> bool {
    host == "localhost"
        || host.ends_with(".localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(api_keys: &[&str], cors_origins: &[&str]) -> Result<Access, GatewayError> {
        let owned = |list: &[&str]| list.iter().map(|s| s.to_string()).collect();
        let options = GatewayOptions {
            model_name: "m".into(),
            model_bytes: 1,
            any_model_name: false,
            api_keys: owned(api_keys),
            api_key_sha256: Vec::new(),
            named_api_keys: None,
            cors_origins: owned(cors_origins),
        };
        Access::new(&options, true)
    }

    fn host(name: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::HOST, HeaderValue::from_static(name))])
    }

    #[test]
    fn an_empty_key_is_refused_rather_than_meaning_no_key() {
        for bad in ["", "two words", "new\nline", &"k".repeat(MAX_KEY_BYTES + 1)] {
            let refused = access(&["good", bad], &[]);
            assert!(
                matches!(refused, Err(GatewayError::ApiKey { number: 2 })),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn only_origins_are_taken_as_origins() {
        for bad in [
            "chat.example",
            "https://chat.example/path",
            "https://u@chat.example",
            "",
        ] {
            let refused = access(&[], &[bad]);
            assert!(
                matches!(refused, Err(GatewayError::CorsOrigin { .. })),
                "{bad:?}"
            );
        }
        assert!(
            access(
                &[],
                &["https://chat.example:8443", "http://[::1]:3000", "*"]
            )
            .is_ok()
        );
    }

    #[test]
    fn a_rebound_name_is_refused_and_addresses_are_not() {
        let open = access(&[], &["https://chat.example"]).unwrap();
        for known in [
            "localhost:8080",
            "127.0.0.1:8080",
            "[::1]:8080",
            "192.168.1.5",
            "CHAT.example:8080",
        ] {
            assert!(open.check_host(&host(known)).is_ok(), "{known}");
        }
        for unknown in [
            "evil.example:8080",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "a b",
        ] {
            assert!(open.check_host(&host(unknown)).is_err(), "{unknown}");
        }
        let keyed = access(&["key"], &[]).unwrap();
        assert!(keyed.check_host(&host("evil.example")).is_ok());
    }

    #[test]
    fn keys_are_compared_whole() {
        assert!(equal_in_constant_time("abc", "abc"));
        for other in ["abd", "Abc", "ab", "abcd", ""] {
            assert!(!equal_in_constant_time("abc", other), "{other}");
        }
        let keys = ["a", "b", "b"].map(String::from);
        let position = |digest| position_of(digest, keys.iter());
        assert_eq!((position("a"), position("b")), (Some(0), Some(2)));
        assert_eq!(position("c"), None);
    }
}
