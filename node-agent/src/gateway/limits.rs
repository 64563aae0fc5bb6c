//! How much clients may take of rank 0 before anything is computed for them. These are no options: a household stays far below.

use std::time::Duration;

/// With the defaults some 400 MB at most, and fewer than the 1,024 files that a process may open by default.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at a time. Where there are more, the one whose client has kept the server waiting longest is closed.
    pub connections: usize,
    /// Time to send a request's head. A connection may be idle for as long between requests; proxies leave theirs so for 60 s.
    pub head: Duration,
    /// Time to send a request's body.
    pub body: Duration,
    /// Time in which a client must take in what was sent to it (Linux only; elsewhere it may be as many events behind as
    /// [`crate::generation`] keeps).
    pub reading: Duration,
    /// Requests for generations at a time, from when their body is there to the end of their answer. Fewer than connections, so that
    /// probes are answered whatever these do.
    pub requests: usize,
    /// Bytes of all large bodies together that are not tokenized yet: of those with more than [`OWN_BYTES`].
    pub body_bytes: usize,
    /// How long a body waits for as many of these as it is long, unless many wait already.
    pub waiting: Duration,
    /// Longer bodies cannot be a chat that fits the context. They come in at a pace, and are read where nothing else computes.
    pub chat_bytes: usize,
}

/// Bytes of a body that need no room among the large ones: a usual chat has fewer.
pub const OWN_BYTES: usize = 64 << 10;

/// Text has some four for a token, and JSON's escapes make it longer.
const BYTES_OF_TOKEN: usize = 8;

/// Bytes that are read ahead of a connection, and so of a request's head.
const READ_AHEAD: usize = 64 << 10;

impl Limits {
    pub(super) fn of_connections(&self) -> prima_connections::Limits {
        prima_connections::Limits {
            connections: self.connections,
            head: self.head,
            reading: self.reading,
            read_ahead: READ_AHEAD,
            cut_off_waiting: false,
        }
    }

    /// For chats of so many tokens, with their answers.
    pub fn of_context(tokens: usize) -> Self {
        Self {
            chat_bytes: OWN_BYTES.max(BYTES_OF_TOKEN.saturating_mul(tokens)),
            ..Self::default()
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            head: Duration::from_secs(75),
            body: Duration::from_secs(30),
            reading: Duration::from_secs(30),
            requests: 384,
            body_bytes: 48 << 20,
            waiting: Duration::from_secs(2),
            chat_bytes: OWN_BYTES,
        }
    }
}
