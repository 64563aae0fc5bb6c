//! Every refusal that the gateway can give, and how it looks: OpenAI's body
//! `{"error":{"message","type","param","code"}}` with the status and headers that clients act on.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::generation::{GenerationError, SubmitError};

#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// A field of the body is missing, of the wrong type or out of range.
    #[error("{problem}")]
    Invalid { param: String, problem: String },
    #[error("the body is not a JSON object: {problem}")]
    NotJson { problem: String },
    /// Understood, but this server does not do it.
    #[error("{problem}")]
    NotSupported { param: String, problem: String },
    #[error(
        "this server needs an API key: send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"
    )]
    NoKey,
    #[error("the API key is not one of this server's")]
    WrongKey,
    #[error(
        "the host `{host}` is not a name of this server, which listens on loopback without an API key; \
         call it by its address, or start it with --api-key, or with --cors-origin for that host"
    )]
    UnknownHost { host: String },
    #[error("no such route: {method} {path}")]
    NoSuchRoute { method: Method, path: String },
    #[error("{path} does not take {method}; the Allow header names what it takes")]
    MethodNotAllowed { method: Method, path: String },
    #[error("the model `{asked}` does not exist; this server serves `{served}`")]
    NoSuchModel { asked: String, served: String },
    #[error("no response `{id}` is kept here (any more); send the conversation again")]
    NoSuchResponse { id: String },
    /// In Anthropic's words, which clients look for.
    #[error("prompt is too long: {tokens} tokens > {context} maximum")]
    PromptTooLong { tokens: usize, context: usize },
    #[error("the body is larger than {limit} bytes")]
    BodyTooLarge { limit: usize },
    #[error("the body holds more than {limit} JSON values")]
    TooManyValues { limit: usize },
    #[error("the body could not be read: {problem}")]
    BodyUnreadable { problem: String },
    #[error("the body did not arrive within {seconds} s")]
    BodyTimeout { seconds: u64 },
    #[error("{why}; try again later")]
    Busy { why: &'static str },
    #[error(
        "the API key {name} has used the {tokens_per_minute} tokens that it may have in a minute; try again in {} s",
        seconds_of(*retry_after)
    )]
    KeyLimit {
        name: String,
        tokens_per_minute: u64,
        retry_after: Duration,
    },
    #[error("web pages must send JSON with `Content-Type: application/json`, not {found}")]
    MediaType { found: String },
    /// Begins with llama.cpp's words.
    #[error("Loading model: {awaited}")]
    Loading { awaited: String },
    #[error("the ring cannot serve: {reason}")]
    RingFailed { reason: String },
    #[error("{0}")]
    Submit(#[from] SubmitError),
    #[error("{0}")]
    Generation(#[from] GenerationError),
    /// A defect of ours.
    #[error("internal error while {action}")]
    Internal { action: &'static str },
}

/// OpenAI's `type`.
const INVALID_REQUEST: &str = "invalid_request_error";
const SERVER: &str = "server_error";
/// llama.cpp's `type` while a model loads, on which its clients wait and retry.
const UNAVAILABLE: &str = "unavailable_error";

/// Seconds after which it is worth asking a loading ring again.
const LOADING_RETRY_SECONDS: u64 = 2;
/// Seconds after which a server that is busy with other requests may have room.
const BUSY_RETRY_SECONDS: u64 = 5;

impl ApiError {
    pub fn invalid(param: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid {
            param: param.into(),
            problem: problem.into(),
        }
    }

    pub fn not_supported(param: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::NotSupported {
            param: param.into(),
            problem: problem.into(),
        }
    }

    /// `{"error":{...}}`: the answer's body, and the last event of a stream that failed.
    pub fn body(&self) -> Value {
        let look = self.look();
        json!({"error": {
            "message": self.to_string(),
            "type": look.kind,
            "param": self.param(),
            "code": look.code,
        }})
    }

    fn param(&self) -> Option<&str> {
        match self {
            Self::Invalid { param, .. } | Self::NotSupported { param, .. } => Some(param),
            Self::NoSuchModel { .. } => Some("model"),
            Self::NoSuchResponse { .. } => Some("id"),
            Self::Submit(SubmitError::Invalid { field, .. }) => Some(field),
            _ => None,
        }
    }

    fn look(&self) -> Look {
        let look = |status, kind, code: &str| Look {
            status,
            kind,
            code: code.into(),
            retry_after: None,
        };
        let bad_request = |code| look(StatusCode::BAD_REQUEST, INVALID_REQUEST, code);
        let too_many = |retry_after| Look {
            retry_after: Some(retry_after),
            ..look(
                StatusCode::TOO_MANY_REQUESTS,
                "rate_limit_error",
                "rate_limit_exceeded",
            )
        };
        let unavailable = || Look {
            status: StatusCode::SERVICE_UNAVAILABLE,
            kind: UNAVAILABLE,
            code: 503.into(),
            retry_after: Some(LOADING_RETRY_SECONDS),
        };
        match self {
            Self::Invalid { .. } => bad_request("invalid_value"),
            Self::PromptTooLong { .. } => bad_request("context_length_exceeded"),
            Self::NotJson { .. } => bad_request("invalid_json"),
            Self::BodyUnreadable { .. } => bad_request("invalid_body"),
            Self::NotSupported { .. } => bad_request("unsupported_parameter"),
            Self::NoKey | Self::WrongKey => {
                look(StatusCode::UNAUTHORIZED, INVALID_REQUEST, "invalid_api_key")
            }
            Self::UnknownHost { .. } => {
                look(StatusCode::FORBIDDEN, INVALID_REQUEST, "unknown_host")
            }
            Self::NoSuchRoute { .. } => {
                look(StatusCode::NOT_FOUND, INVALID_REQUEST, "no_such_route")
            }
            Self::NoSuchResponse { .. } => {
                look(StatusCode::NOT_FOUND, INVALID_REQUEST, "response_not_found")
            }
            Self::NoSuchModel { .. } => {
                look(StatusCode::NOT_FOUND, INVALID_REQUEST, "model_not_found")
            }
            Self::MethodNotAllowed { .. } => look(
                StatusCode::METHOD_NOT_ALLOWED,
                INVALID_REQUEST,
                "method_not_allowed",
            ),
            Self::BodyTooLarge { .. } | Self::TooManyValues { .. } => look(
                StatusCode::PAYLOAD_TOO_LARGE,
                INVALID_REQUEST,
                "body_too_large",
            ),
            Self::BodyTimeout { .. } => {
                look(StatusCode::REQUEST_TIMEOUT, INVALID_REQUEST, "body_timeout")
            }
            Self::Busy { .. } => too_many(BUSY_RETRY_SECONDS),
            Self::KeyLimit { retry_after, .. } => too_many(seconds_of(*retry_after)),
            Self::MediaType { .. } => look(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                INVALID_REQUEST,
                "unsupported_media_type",
            ),
            Self::Loading { .. } | Self::RingFailed { .. } => unavailable(),
            Self::Submit(error) => match error {
                SubmitError::Full { retry_after, .. } => too_many(seconds_of(*retry_after)),
                // As OpenAI does; clients take a 413 for a body that is too large.
                SubmitError::ContextExceeded { .. } => bad_request("context_length_exceeded"),
                SubmitError::NotReady { .. } => unavailable(),
                SubmitError::Invalid { .. } => bad_request("invalid_value"),
            },
            Self::Generation(error) => match error {
                GenerationError::MemberLost { .. } => {
                    look(StatusCode::BAD_GATEWAY, SERVER, "member_lost")
                }
                GenerationError::Deadline { .. } => {
                    look(StatusCode::GATEWAY_TIMEOUT, SERVER, "deadline_exceeded")
                }
                GenerationError::Refused { .. } => {
                    look(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "ring_refused")
                }
                GenerationError::Logits { .. } => {
                    look(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "bad_logits")
                }
                GenerationError::ShuttingDown => Look {
                    retry_after: Some(LOADING_RETRY_SECONDS),
                    ..look(StatusCode::SERVICE_UNAVAILABLE, SERVER, "shutting_down")
                },
            },
            Self::Internal { .. } => look(StatusCode::INTERNAL_SERVER_ERROR, SERVER, "internal"),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let look = self.look();
        let mut response = (look.status, Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = look.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if matches!(self, Self::NoKey | Self::WrongKey) {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// For the header Retry-After. At least 1: a client told to wait 0 s would hammer a full server.
fn seconds_of(pause: Duration) -> u64 {
    pause.as_secs_f64().ceil().max(1.0) as u64
}

/// The same answer with another API's body.
pub fn with_body(answer: Response, body: &Value) -> Response {
    let (parts, _) = answer.into_parts();
    let mut headers = parts.headers;
    headers.remove(header::CONTENT_LENGTH);
    (parts.status, headers, Json(body)).into_response()
}

pub async fn no_such_route(method: Method, uri: Uri) -> Response {
    let path = uri.path();
    let error = ApiError::NoSuchRoute {
        method,
        path: path.into(),
    };
    super::refusal(path, error)
}

pub async fn method_not_allowed(method: Method, uri: Uri) -> Response {
    let path = uri.path();
    let error = ApiError::MethodNotAllowed {
        method,
        path: path.into(),
    };
    super::refusal(path, error)
}

/// How an error looks, apart from its message.
struct Look {
    status: StatusCode,
    kind: &'static str,
    /// A word, or a number where llama.cpp's clients expect one.
    code: Value,
    retry_after: Option<u64>,
}
