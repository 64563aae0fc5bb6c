//! Who may call: API keys, web origins (CORS) and, against DNS rebinding, host names. It keeps no users and no rate
//! limits, and never logs a key.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::{IpAddr, SocketAddr};

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use sha2::{Digest, Sha256};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer, ExposeHeaders};

use super::openai_error::ApiError;
use super::{Gateway, GatewayError, GatewayOptions, request_id};

/// Bounds the work of comparing.
pub const MAX_KEY_BYTES: usize = 512;

/// The checked form of the access options.
pub struct Access {
    /// SHA-256 of each key, so that keys known only by their hash are no special case.
    keys: Vec<[u8; 32]>,
    origins: Origins,
    /// Only loopback without keys is open to a page that rebinds its own name to 127.0.0.1. With keys, such a page
    /// knows none; on other addresses, we cannot know the names under which people reach the server.
    check_host: bool,
}

/// Whose request it is, for the routes behind [`require_key`].
#[derive(Clone, Copy)]
pub struct Caller {
    /// The number of its key, from 1; 0 where no key is asked for.
    pub keyspace: u64,
    /// Its key where one is asked for, else its address.
    pub client: u64,
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
        let mut keys: Vec<[u8; 32]> = options.api_keys.iter().map(digest).collect();
        for (position, text) in options.api_key_sha256.iter().enumerate() {
            keys.push(digest_of_hex(text).ok_or(GatewayError::ApiKeySha256 {
                number: position + 1,
            })?);
        }
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
            check_host: on_loopback && keys.is_empty(),
            keys,
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

    /// The number of the key that was sent, from 1; 0 where none is asked for.
    fn check_key(&self, headers: &HeaderMap) -> Result<u64, ApiError> {
        if self.keys.is_empty() {
            return Ok(0);
        }
        let sent = digest(sent_key(headers).ok_or(ApiError::NoKey)?);
        // Every key is compared, even after a match.
        let keys = (1..).zip(&self.keys);
        let keyspace = keys.fold(0, |known, (number, key)| {
            match equal_in_constant_time(&sent, key) {
                true => number,
                false => known,
            }
        });
        match keyspace {
            0 => Err(ApiError::WrongKey),
            keyspace => Ok(keyspace),
        }
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
) -> Result<Response, ApiError> {
    let keyspace = gateway.0.access.check_key(request.headers())?;
    let address = request.extensions().get::<ConnectInfo<SocketAddr>>();
    let client = match keyspace {
        0 => address.map_or(0, |ConnectInfo(address)| number_of(address.ip())),
        key => key,
    };
    request.extensions_mut().insert(Caller { keyspace, client });
    Ok(next.run(request).await)
}

pub async fn require_known_host(
    State(gateway): State<Gateway>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    gateway.0.access.check_host(request.headers())?;
    Ok(next.run(request).await)
}

fn number_of(address: IpAddr) -> u64 {
    let mut hasher = DefaultHasher::new();
    address.hash(&mut hasher);
    hasher.finish()
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

fn digest(key: impl AsRef<[u8]>) -> [u8; 32] {
    Sha256::digest(key).into()
}

/// A digest in hexadecimal.
fn digest_of_hex(text: &str) -> Option<[u8; 32]> {
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else {
        return None;
    };
    let mut digest = [0; 32];
    if pairs.len() != digest.len() {
        return None;
    }
    let value = |digit: u8| char::from(digit).to_digit(16);
    for (byte, [high, low]) in digest.iter_mut().zip(pairs) {
        *byte = (value(*high)? << 4 | value(*low)?) as u8;
    }
    Some(digest)
}

/// Takes the same time however much the two differ.
fn equal_in_constant_time(a: &[u8; 32], b: &[u8; 32]) -> bool {
    let difference = a.iter().zip(b).fold(0u8, |difference, (a, b)| {
        std::hint::black_box(difference | (a ^ b))
    });
    difference == 0
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
            any_model_name: false,
            api_keys: owned(api_keys),
            api_key_sha256: Vec::new(),
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
        assert!(equal_in_constant_time(&digest("abc"), &digest("abc")));
        for other in ["abd", "Abc", "ab", "abcd", ""] {
            assert!(!equal_in_constant_time(&digest("abc"), &digest(other)));
        }
        let (mut first, mut last) = (digest("abc"), digest("abc"));
        first[0] ^= 1;
        last[31] ^= 1;
        assert!(!equal_in_constant_time(&digest("abc"), &first));
        assert!(!equal_in_constant_time(&digest("abc"), &last));
    }

    #[test]
    fn a_digest_is_64_hexadecimal_digits() {
        // FIPS 180-2, B.1.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest_of_hex(abc), Some(digest("abc")));
        assert_eq!(digest_of_hex(&abc.to_uppercase()), Some(digest("abc")));
        for bad in [
            &abc[1..],
            &abc[2..],
            "",
            &abc.replace('b', "x"),
            &abc.replace("ba", "ä"),
        ] {
            assert_eq!(digest_of_hex(bad), None, "{bad}");
        }
    }
}
