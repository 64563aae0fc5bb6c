//! What all connections between machines have in common, both ring streams and link measurements: their settings, how a lost one is
//! detected, and a slot for services that take only one client at a time.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prima_crds::printable;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tonic::Status;
use tonic::transport::{Endpoint, Server};

pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A neighbour of whom nothing was heard for this long is pinged, and counts as lost if the ping stays unanswered for the time below. Pinging
/// soon finds a dead one soon, and takes nothing from the time that a slow one has for its answer. That time is long since an answer
/// may wait for a busy machine's processor, and the ping for a part of a prompt's chunk on a slow link: 4 MiB take more than 3 s at 10 Mbit/s. Long
/// before, rank 0 says that the ring stands still (`signs_of_life`).
const PING_INTERVAL: Duration = Duration::from_secs(2);
const PING_TIMEOUT: Duration = Duration::from_secs(6);
/// Whose system takes in nothing for this long is gone: the machine is off, or the way to it is cut. A system answers for programs that are busy, so
/// this tells sooner than pings. (A program that reads nothing until its buffers are full is gone, too.) It counts from the first try to send
/// something again. To an idle successor that may be a ping, which goes out up to `PING_INTERVAL` after the cut: 5.3 s in all; to a predecessor it is
/// a sign of life, after 0.5 s: 3.7 s. There is time for four tries (after 0.2, 0.6, 1.4 and 3 s), and for twice as many where few packets are on
/// their way ([`set_up`]): enough in a network at home, where one packet in a hundred may be lost, or one in five for a while.
const UNREACHABLE: Duration = Duration::from_secs(3);
/// How often the other system is asked while nothing else goes over a connection.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// A member has one predecessor, and strangers should not get many streams.
const MAX_STREAMS_PER_CONNECTION: u32 = 4;

/// A server for messages of at most this size.
pub fn server(max_message_bytes: usize) -> Server {
    Server::builder()
        .initial_stream_window_size(window_bytes(max_message_bytes))
        .initial_connection_window_size(window_bytes(max_message_bytes))
        .max_frame_size(frame_bytes(max_message_bytes))
        .max_concurrent_streams(MAX_STREAMS_PER_CONNECTION)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
}

/// How to connect to a member.
pub fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    Ok(Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true))
}

/// Sets up a connection to another machine: packets leave at once, however small; those that are lost are sent again soon, and again as soon; and it
/// breaks when that machine cannot be reached. (Rings without TLS are on one machine.)
///
/// # Errors
/// A system that holds packets back. One without the other options leaves it to pings.
pub fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    if let Err(error) = set_timeouts(&SockRef::from(stream)) {
        tracing::debug!(%error, "options of a connection not set");
    }
    Ok(())
}

fn set_timeouts(socket: &SockRef<'_>) -> io::Result<()> {
    // So many tries count where the time below cannot be set.
    let keepalive = TcpKeepalive::new()
        .with_time(ASK_INTERVAL)
        .with_interval(ASK_INTERVAL)
        .with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    // Also while something is on its way.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        socket.set_tcp_user_timeout(Some(UNREACHABLE))?;
        // Up to six tries every 0.2 s or so while fewer than four packets are on their way, instead of pauses that double: a token is one.
        socket.set_tcp_thin_linear_timeouts(true)?;
    }
    Ok(())
}

/// A slot for one client: a predecessor, or a borrower. Freed on drop.
pub struct Slot(Arc<AtomicBool>);

impl Slot {
    pub fn claim(occupied: &Arc<AtomicBool>) -> Option<Self> {
        let free = !occupied.swap(true, Ordering::AcqRel);
        free.then(|| Self(occupied.clone()))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The innermost message of an error: what happened to the socket, rather than what it meant to the layers above.
pub fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let cause = match innermost.downcast_ref::<Status>() {
        // The other's words.
        Some(status) => printable(status.message()),
        None => innermost.to_string(),
    };
    // TLS has more to say about an end than people want to know.
    match cause.contains("without sending TLS close_notify") {
        true => "the connection ended".to_owned(),
        false => cause,
    }
}

/// Flow control must not stop a chunk half way: room for two of the largest messages.
pub fn window_bytes(max_message_bytes: usize) -> u32 {
    const LARGEST: usize = (1 << 31) - 1;
    (2 * max_message_bytes).clamp(1 << 20, LARGEST) as u32
}

/// Messages go in parts of so many bytes at most, between which pings get through.
pub fn frame_bytes(max_message_bytes: usize) -> u32 {
    const LARGEST: usize = 4 << 20;
    max_message_bytes.clamp(1 << 14, LARGEST) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rank 0 still has to hear of it, over links that may take a second, and what was written before the silence arrives later, too.
    #[test]
    fn silence_is_noticed_within_ten_seconds() {
        let noticed = PING_INTERVAL + PING_TIMEOUT;
        assert!(noticed <= Duration::from_secs(8), "{noticed:?}");
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn both_ends_ask_whether_the_other_is_there() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (one, other) = tokio::join!(TcpStream::connect(address), listener.accept());
        for stream in [one.unwrap(), other.unwrap().0] {
            set_up(&stream).unwrap();
            let socket = SockRef::from(&stream);
            assert_eq!(socket.tcp_user_timeout().unwrap(), Some(UNREACHABLE));
            assert!(socket.tcp_thin_linear_timeouts().unwrap());
            assert!(socket.keepalive().unwrap() && stream.nodelay().unwrap());
            assert_eq!(socket.tcp_keepalive_time().unwrap(), ASK_INTERVAL);
        }
    }
}
