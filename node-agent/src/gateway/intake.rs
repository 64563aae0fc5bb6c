//! From a request's body to what it asks for, within bounds: how many requests are in hand, how many bytes of them wait to be read, and on
//! how many threads they are parsed and tokenized. It does not know what is asked.
//!
//! A body that turns out to be large, and only then, needs room for its whole length. So large ones are received few at a time, one after
//! another, and nobody keeps room from others by announcing what never comes. A request that finds no place, or no room in time, is told to
//! come again. Those that are too large for a chat of the context come in at a pace, and are read on threads of their own, with what the ring
//! leaves of the processors: they keep neither its tokens nor other requests waiting.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use futures::StreamExt;
use http_body::Body as _;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::GatewayError;
use super::limits::{Limits, OWN_BYTES};
use super::openai_error::ApiError;
use super::request::{self, Fields, MAX_BODY_BYTES};
use crate::idle_thread::only_when_idle;

pub struct Intake {
    limits: Limits,
    places: Arc<Semaphore>,
    room: Arc<Semaphore>,
    /// Bytes that wait for room.
    queued: AtomicUsize,
    /// To pause while a body comes in that can be no chat of the context: one after another, in the order in which they ask.
    turn: Mutex<()>,
    threads: Threads,
    threads_for_large: Threads,
}

/// What a request asks for, and what it holds meanwhile.
pub struct Taken<T> {
    pub asked: T,
    /// Until it is answered.
    pub place: OwnedSemaphorePermit,
    /// Until the ring has it or has refused it.
    pub room: Option<OwnedSemaphorePermit>,
}

impl<A, B> Taken<(A, B)> {
    /// What the ring is to have, and what is for whoever answers.
    pub fn apart(self) -> (Taken<A>, B) {
        let Self {
            asked: (asked, rest),
            place,
            room,
        } = self;
        (Taken { asked, place, room }, rest)
    }
}

impl Intake {
    pub fn new(limits: Limits) -> Result<Self, GatewayError> {
        let threads = |lower| Threads::start(lower).map_err(GatewayError::Threads);
        Ok(Self {
            places: Arc::new(Semaphore::new(limits.requests)),
            room: Arc::new(Semaphore::new(limits.body_bytes)),
            queued: AtomicUsize::new(0),
            turn: Mutex::default(),
            threads: threads(after_others)?,
            threads_for_large: threads(only_when_idle)?,
            limits,
        })
    }

    /// What `read` makes of the body's JSON object.
    pub async fn take<T: Send + 'static>(
        &self,
        http: Request,
        read: impl FnOnce(&Fields<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<Taken<T>, ApiError> {
        request::check_content_type(http.headers())?;
        let received = timeout(self.limits.body, self.receive(http.into_body())).await;
        let (body, room) = received.map_err(|_| ApiError::BodyTimeout {
            seconds: self.limits.body.as_secs(),
        })??;
        let places = self.places.clone();
        let place = places.try_acquire_owned().map_err(|_| ApiError::Busy {
            why: "as many requests as this server takes are being answered",
        })?;
        let threads = match body.len() > self.limits.chat_bytes {
            false => &self.threads,
            true => &self.threads_for_large,
        };
        // All that it holds goes along: if the client hangs up now, it is held until the thread is done, if that has begun. Else it comes
        // back and is given up here: if that thread stopped in the midst of it, whoever allocates memory or asks for room would wait.
        let reading = move || {
            let asked = request::object(&body).and_then(|object| read(&Fields::new(&object)));
            (asked, place, room, body)
        };
        let mut reading = Reading(threads.handle.spawn_blocking(reading));
        let done = (&mut reading.0).await;
        let (asked, place, room, _body) = done.map_err(|_| ApiError::Internal {
            action: "reading the request",
        })?;
        Ok(Taken {
            asked: asked?,
            place,
            room,
        })
    }

    /// Room for so many bytes, once others leave it; not for more than there is for all. Nobody waits behind a long queue: there would be no
    /// room in time, and all who came together would be refused in the same moment.
    pub async fn room(&self, bytes: u32) -> Result<OwnedSemaphorePermit, ApiError> {
        let busy = || ApiError::Busy {
            why: "other requests take all the memory for requests",
        };
        let queued = Queued::join(&self.queued, bytes as usize);
        if queued.before > QUEUED * self.limits.body_bytes {
            return Err(busy());
        }
        let free = self.room.clone().acquire_many_owned(bytes);
        let free = timeout(self.limits.waiting, free).await;
        free.ok().and_then(Result::ok).ok_or_else(busy)
    }

    /// The bytes that there is room for in all.
    pub fn all_room(&self) -> usize {
        self.limits.body_bytes
    }

    /// The body's bytes, and the room for them if there are many.
    async fn receive(
        &self,
        body: Body,
    ) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ApiError> {
        let too_large = ApiError::BodyTooLarge {
            limit: MAX_BODY_BYTES,
        };
        let announced = body.size_hint();
        if announced.lower() > MAX_BODY_BYTES as u64 {
            return Err(too_large);
        }
        let length = announced.exact().unwrap_or(MAX_BODY_BYTES as u64) as u32;
        let no_chat = length as usize > self.limits.chat_bytes;
        let mut room = None;
        let mut bytes = Vec::new();
        // What came since the last pause.
        let mut unpaced = 0;
        let mut arriving = body.into_data_stream();
        while let Some(part) = arriving.next().await {
            let part = part.map_err(|error| ApiError::BodyUnreadable {
                problem: error.to_string(),
            })?;
            if bytes.len() + part.len() > MAX_BODY_BYTES {
                return Err(too_large);
            }
            if bytes.len() + part.len() > OWN_BYTES && room.is_none() {
                // What is read slowly must not take the places of all requests: some hundred fit into the room.
                let least = match no_chat {
                    false => 0,
                    true => SLOW_BYTES,
                };
                room = Some(self.room(length.max(least)).await?);
                bytes.reserve_exact((length as usize).saturating_sub(bytes.len()));
            }
            bytes.extend_from_slice(&part);
            if no_chat && room.is_some() {
                unpaced += part.len().max(LEAST_PART);
                if unpaced >= STRETCH {
                    self.pause(unpaced).await;
                    unpaced = 0;
                }
            }
        }
        Ok((bytes, room))
    }

    /// The time that so many bytes are to take, behind the pauses of others.
    async fn pause(&self, bytes: usize) {
        let _turn = self.turn.lock().await;
        sleep(Duration::from_micros(bytes as u64 / BYTES_PER_MICROSECOND)).await;
    }
}

/// Where so many times what there is room for waits already, nobody else does.
const QUEUED: usize = 4;
/// The room that a body takes at least that is read where nothing else computes.
const SLOW_BYTES: u32 = 512 << 10;
/// At most, of all bodies together that can be no chat of the context. Copied as fast as they come, they take processors from the ring.
const BYTES_PER_MICROSECOND: u64 = 64;
/// Bytes of such a body that come in without a pause: less than a millisecond of copying, and enough for a pause that timers can tell.
const STRETCH: usize = 128 << 10;
/// A smaller part of a body counts as so many bytes: it costs no less.
const LEAST_PART: usize = 1 << 10;

/// Bytes that wait for room, until this is dropped.
struct Queued<'a> {
    queue: &'a AtomicUsize,
    bytes: usize,
    /// What waited before.
    before: usize,
}

impl<'a> Queued<'a> {
    fn join(queue: &'a AtomicUsize, bytes: usize) -> Self {
        let before = queue.fetch_add(bytes, Ordering::Relaxed);
        Self {
            queue,
            bytes,
            before,
        }
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.queue.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Has not begun yet, or nobody can stop it. What has not begun is forgotten with this.
struct Reading<T>(JoinHandle<T>);

impl<T> Drop for Reading<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Address space, of which a request uses what it needs: rules of a grammar that lead to rules are followed by calls within calls.
const STACK_BYTES: usize = 64 << 20;

/// Few, since each may need 100 MB for a large hostile request, and the ring's computing goes first.
struct Threads {
    handle: Handle,
    /// `None` once it is dropped.
    runtime: Option<Runtime>,
}

impl Threads {
    /// With the priority that `lower` gives to each.
    fn start(lower: fn() -> io::Result<()>) -> io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads((cores / 2).clamp(1, 2))
            .thread_name("request")
            .thread_stack_size(STACK_BYTES)
            .on_thread_start(move || {
                if let Err(error) = lower() {
                    tracing::debug!(%error, "priority not set");
                }
            })
            .build()?;
        Ok(Self {
            handle: runtime.handle().clone(),
            runtime: Some(runtime),
        })
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // Without waiting for them, which may not be done here.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// For usual requests: a tenth of a processor that computes for the ring. (Others get what the ring leaves.)
fn after_others() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::setpriority_process(None, 10)?;
    Ok(())
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::convert::Infallible;
    use std::iter::repeat_n;
    use std::time::Instant;

    use futures::future::join_all;
    use futures::{FutureExt as _, stream};
    use serde_json::json;

    use super::*;
    use crate::process_stat::field;

    /// Of the thread that asks: its nice value, and whether it computes only where nobody else does.
    fn priority() -> (u64, bool) {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (nice, policy) = (field(&stat, 19).unwrap(), field(&stat, 41).unwrap());
        (nice, policy == libc::SCHED_IDLE as u64)
    }

    #[tokio::test]
    async fn what_is_no_chat_is_read_where_nothing_else_computes() {
        let intake = Intake::new(Limits::default()).unwrap();
        for (bytes, expected) in [(100, (10, false)), (OWN_BYTES, (priority().0, true))] {
            let body = json!({"prompt": "x".repeat(bytes)}).to_string();
            let http = Request::builder()
                .header("content-type", "application/json")
                .body(Body::from(body))
                .unwrap();
            let taken = intake.take(http, |_| Ok(priority())).await;
            let Ok(taken) = taken else {
                panic!("a body of {bytes} bytes is refused")
            };
            assert_eq!(taken.asked, expected, "{bytes}");
        }
    }

    #[tokio::test]
    async fn bodies_that_are_no_chats_share_a_pace() {
        const BODIES: usize = 4;
        const PART: usize = 64 << 10;
        let intake = Intake::new(Limits::default()).unwrap();
        let begun = Instant::now();
        let received = (0..BODIES).map(|_| {
            let parts = repeat_n(vec![b' '; PART], MAX_BODY_BYTES / PART);
            let parts = stream::iter(parts.map(Ok::<_, Infallible>));
            intake.receive(Body::from_stream(parts))
        });
        for received in join_all(received).await {
            let Ok((bytes, _)) = received else {
                panic!("a body is refused")
            };
            assert_eq!(bytes.len(), MAX_BODY_BYTES);
        }
        // Neither what came before there was room, nor the end of a body is paused for.
        let paced = BODIES * (MAX_BODY_BYTES - 2 * STRETCH);
        let least = Duration::from_micros(paced as u64 / BYTES_PER_MICROSECOND);
        assert!(begun.elapsed() >= least, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn nobody_waits_for_room_behind_a_long_queue() {
        const ALL: u32 = 1000;
        let limits = Limits {
            body_bytes: ALL as usize,
            // Nobody gives up here.
            waiting: Duration::from_secs(3600),
            ..Limits::default()
        };
        let intake = Intake::new(limits).unwrap();
        let comes = || {
            let mut room = Box::pin(intake.room(ALL));
            let answer = room.as_mut().now_or_never();
            (room, answer)
        };
        let (_, first) = comes();
        assert!(matches!(first, Some(Ok(_))));
        let mut queue = Vec::new();
        for _ in 0..=QUEUED {
            let (waiting, answer) = comes();
            assert!(answer.is_none());
            queue.push(waiting);
        }
        for _ in 0..3 {
            let (_, answer) = comes();
            assert!(matches!(answer, Some(Err(ApiError::Busy { .. }))));
        }
        // Whoever gets it leaves the queue, and so does who hangs up.
        drop(first);
        let has_it = queue.remove(0).await;
        assert!(has_it.is_ok());
        queue.pop();
        for _ in 0..2 {
            let (waiting, answer) = comes();
            assert!(answer.is_none());
            queue.push(waiting);
        }
        let (_, answer) = comes();
        assert!(matches!(answer, Some(Err(ApiError::Busy { .. }))));
    }

    #[tokio::test]
    async fn a_chat_does_not_wait_for_larger_bodies() {
        const CHAT: usize = 1 << 20;
        let limits = Limits {
            chat_bytes: CHAT,
            ..Limits::default()
        };
        let intake = Intake::new(limits).unwrap();
        let received = |bytes| {
            let body = Body::from(vec![b' '; bytes]);
            intake.receive(body).now_or_never()
        };
        // Another one has it, and keeps it.
        let _turn = intake.turn.lock().await;
        assert!(matches!(received(CHAT), Some(Ok(_))));
        assert!(received(CHAT + 1).is_none());
    }
}
