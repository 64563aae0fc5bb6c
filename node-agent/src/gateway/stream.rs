//! Streams an answer: what an API writes of it, as server-sent events or as JSON lines, as it comes. When the client hangs up, the stream is
//! dropped, and with it what is in flight.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{Stream, StreamExt, unfold};
use serde_json::Value;

use super::in_flight::{AnswerProgress, InFlight};

/// How one API writes a streamed answer.
pub trait Format: Send + 'static {
    /// Before anything has come of so many choices.
    fn begin(&mut self, choices: usize) -> Vec<Message>;
    /// What happened next. After [`AnswerProgress::Done`] and [`AnswerProgress::Failed`] nothing follows.
    fn write(&mut self, progress: AnswerProgress) -> Vec<Message>;
}

/// One event, or one line.
pub struct Message {
    /// Some APIs name their events.
    name: Option<&'static str>,
    data: String,
}

impl Message {
    pub fn json(data: &Value) -> Self {
        Self::text(&data.to_string())
    }

    pub fn named(name: &'static str, data: &Value) -> Self {
        Self {
            name: Some(name),
            ..Self::json(data)
        }
    }

    pub fn text(data: &str) -> Self {
        Self {
            name: None,
            data: data.to_owned(),
        }
    }
}

/// A comment is sent this often, so that proxies do not close a connection while prefill computes.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

pub fn events(in_flight: InFlight, format: impl Format) -> Response {
    let events = messages(in_flight, format).map(|message| {
        let event = Event::default().data(message.data);
        Ok::<_, Infallible>(match message.name {
            Some(name) => event.event(name),
            None => event,
        })
    });
    let sse = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    unbuffered(sse.into_response())
}

pub fn lines(in_flight: InFlight, format: impl Format) -> Response {
    let lines = messages(in_flight, format)
        .map(|message| Ok::<_, Infallible>(format!("{}\n", message.data)));
    let content_type = [(header::CONTENT_TYPE, "application/x-ndjson")];
    unbuffered((content_type, Body::from_stream(lines)).into_response())
}

/// nginx buffers a response before it passes it on, unless told not to.
fn unbuffered(mut response: Response) -> Response {
    response.headers_mut().insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    response
}

fn messages(in_flight: InFlight, mut format: impl Format) -> impl Stream<Item = Message> {
    let begun = VecDeque::from(format.begin(in_flight.choices()));
    unfold(
        (begun, format, Some(in_flight)),
        |(mut ready, mut format, mut in_flight)| async move {
            loop {
                if let Some(message) = ready.pop_front() {
                    return Some((message, (ready, format, in_flight)));
                }
                let progress = in_flight.as_mut()?.next().await?;
                if matches!(
                    progress,
                    AnswerProgress::Done(_) | AnswerProgress::Failed(_)
                ) {
                    in_flight = None;
                }
                ready.extend(format.write(progress));
            }
        },
    )
}
