//! Rank 0's handle on the ring: begins rounds and receives what comes home. It numbers the frames of a session, tracks
//! what is in flight, and reports what a round cost. It decides nothing about sessions, requests, sampling or text
//! (`decode` does).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::ring_plan::RingPlanSpec;
use tokio::sync::mpsc;

use super::frame::{
    Activation, Frame, FrameInput, MAX_FRAME_ROWS, MemberEvent, Operation, Output, Reset, SessionId,
};
use super::hop::Reply;
use super::hop_timing::HopTiming;
use super::signs_of_life::Heard;
use super::transport::Inbound;
use crate::trace::{Span, Trace};

/// Sessions on the ring, by id, and the ring's answers.
pub struct RingClient {
    inbox: mpsc::Sender<Inbound>,
    home: mpsc::UnboundedReceiver<Reply>,
    sessions: HashMap<SessionId, Open>,
    /// Of [`RingClient::ready`].
    last_nonce: u64,
    members: usize,
    heard: Heard,
}

/// What the ring reports to rank 0.
#[derive(Debug)]
pub enum RingEvent {
    Answer {
        session: SessionId,
        /// The logits or states of each row asked for; empty if none was, or if a later frame took back all its positions.
        output: Vec<f32>,
        cost: RoundCost,
    },
    /// The session's KV cache is free on every member.
    Released { session: SessionId },
    /// The probe with this nonce has come home.
    Whole { nonce: u64 },
    /// A member did not compute a frame of this session.
    Refused {
        session: SessionId,
        rank: usize,
        reason: String,
    },
    /// The ring is broken at this rank; all sessions are gone.
    Lost {
        rank: usize,
        /// The rank of its neighbour that does not reach it, where it is not the member itself that ends.
        missed_by: Option<usize>,
        cause: String,
    },
    /// The ring gets on: a member does, at a long pass, or something came home that nobody waits for.
    Busy,
}

/// What one frame cost on its way through all rounds.
#[derive(Clone, Debug)]
pub struct RoundCost {
    /// From its start until it came home.
    pub elapsed: Duration,
    pub rows: usize,
    /// Per member, on that member's clock.
    pub members: Vec<HopTiming>,
}

impl RoundCost {
    /// How long it was on its way, without waiting for other frames at members.
    pub fn without_waiting(&self) -> Duration {
        let waits = self.members.iter().map(|member| member.wait_ns);
        let waited = waits.fold(0, u64::saturating_add);
        self.elapsed.saturating_sub(Duration::from_nanos(waited))
    }

    /// How long the machine computed that took longest. One that reads its weights for every pass is at it all the time: another pass would have
    /// it read them again.
    pub fn slowest_machine(&self, plan: &RingPlanSpec) -> Duration {
        if self.members.iter().any(|member| member.streamed_bytes > 0) {
            return self.without_waiting();
        }
        let mut machines: BTreeMap<&str, u64> = BTreeMap::new();
        for timing in &self.members {
            if let Some(member) = plan.members.get(timing.rank as usize)
                && let Some((host, _)) = member.address.rsplit_once(':')
            {
                let computed = machines.entry(host).or_default();
                *computed = computed.saturating_add(timing.compute_ns);
            }
        }
        Duration::from_nanos(machines.into_values().max().unwrap_or(0))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    #[error("the ring has stopped")]
    Stopped,
    #[error("session {session} is not open")]
    NoSession { session: SessionId },
    #[error("the ring is broken at rank {rank}: {cause}")]
    Lost { rank: usize, cause: String },
    #[error("the ring refused a frame: {reason}")]
    Refused { reason: String },
    #[error("no answer from the ring within {} s", limit.as_secs())]
    Deadline { limit: Duration },
}

/// How long [`RingClient::forward`] and [`RingClient::ready`] wait.
const PATIENCE: Duration = Duration::from_secs(300);

struct Open {
    /// Positions sent so far.
    length: usize,
    /// Sequence of the last frame sent.
    sequence: u64,
    /// Activations, oldest first.
    in_flight: VecDeque<InFlight>,
}

struct InFlight {
    sequence: u64,
    begun: Instant,
    rows: usize,
    /// Ends when the activation is home, or given up.
    _pass: Span,
}

impl RingClient {
    pub(super) fn new(
        inbox: mpsc::Sender<Inbound>,
        home: mpsc::UnboundedReceiver<Reply>,
        members: usize,
    ) -> Self {
        Self {
            inbox,
            home,
            sessions: HashMap::new(),
            last_nonce: 0,
            members,
            heard: Heard::new(members, Instant::now()),
        }
    }

    /// Asks whether the ring is whole, and drops all sessions. The answer is [`RingEvent::Whole`] with this nonce, which must be new.
    pub async fn probe(&mut self, nonce: u64) -> Result<(), RingError> {
        self.sessions.clear();
        let frame = Frame {
            session: 0,
            sequence: 0,
            round: 0,
            traceparent: String::new(),
            timings: Vec::new(),
            operation: Operation::Reset(Reset::Probe { nonce }),
        };
        self.begin(frame, Output::Logits).await
    }

    /// Opens a session on every member. Its id is above that of every session before, and above 0.
    pub async fn create(&mut self, session: SessionId) -> Result<(), RingError> {
        self.open(session, 0);
        self.operate(session, Operation::Create).await
    }

    /// Sends the next `tokens` of a session round the ring: [`Self::send_from`] its end.
    pub async fn send(
        &mut self,
        session: SessionId,
        tokens: &[u32],
        wanted: usize,
    ) -> Result<(), RingError> {
        let length = self.session(session)?.length;
        let untraced = Trace::default();
        self.send_from(session, length, tokens, wanted, Output::Logits, &untraced)
            .await
    }

    /// Sends `tokens` (at most a chunk of the plan) of a session round the ring, in place of whatever it holds from `first_position` on.
    /// [`RingEvent::Answer`] brings `output` of the last `wanted` of them. All this is a part of `trace`.
    pub async fn send_from(
        &mut self,
        session: SessionId,
        first_position: usize,
        tokens: &[u32],
        wanted: usize,
        output: Output,
        trace: &Trace,
    ) -> Result<(), RingError> {
        let open = self.session(session)?;
        let mut pass = trace.begin("pass");
        pass.set("prima.first_position", first_position as i64);
        pass.set("prima.rows", tokens.len() as i64);
        let traceparent = pass.trace().traceparent();
        open.length = first_position + tokens.len();
        open.in_flight.push_back(InFlight {
            sequence: open.sequence + 1,
            begun: Instant::now(),
            rows: tokens.len(),
            _pass: pass,
        });
        let activation = Activation {
            first_position,
            rows: tokens.len(),
            output_rows: wanted,
            refuted: false,
            input: FrameInput::Tokens(tokens.to_vec()),
        };
        let operation = Operation::Activation(activation);
        self.operate_for(session, operation, output, traceparent)
            .await
    }

    /// Opens the session `child`, which continues where `session` stands now. Its id is above that of every session before.
    pub async fn fork(&mut self, session: SessionId, child: SessionId) -> Result<(), RingError> {
        let length = self.session(session)?.length;
        self.open(child, length);
        self.operate(session, Operation::Fork { child }).await
    }

    /// Shortens a session to its first `positions` positions.
    pub async fn truncate(
        &mut self,
        session: SessionId,
        positions: usize,
    ) -> Result<(), RingError> {
        let open = self.session(session)?;
        open.length = open.length.min(positions);
        self.operate(session, Operation::Truncate { positions })
            .await
    }

    /// Closes a session. [`RingEvent::Released`] tells when every member has freed it; answers still in flight are
    /// dropped, each for a [`RingEvent::Busy`].
    pub async fn release(&mut self, session: SessionId) -> Result<(), RingError> {
        self.operate(session, Operation::Release).await?;
        self.sessions.remove(&session);
        Ok(())
    }

    /// The ring's next event; `None` when the ring has stopped. Safe to cancel.
    pub async fn next(&mut self) -> Option<RingEvent> {
        loop {
            let reply = self.home.recv().await?;
            if let Some(event) = self.event(reply) {
                return Some(event);
            }
        }
    }

    /// The next event that is already here, without waiting.
    pub fn try_next(&mut self) -> Option<RingEvent> {
        loop {
            let reply = self.home.try_recv().ok()?;
            if let Some(event) = self.event(reply) {
                return Some(event);
            }
        }
    }

    /// The rank of the first member of which nothing was heard for a while, though nothing says that it is lost. What is on the ring has to be taken
    /// with [`Self::try_next`] before, and this to be asked several times a second.
    pub fn silent(&mut self) -> Option<usize> {
        self.heard.silent(Instant::now())
    }

    /// Sends `tokens` in chunks, several in flight, and waits for the logits of the last one (`vocabulary` numbers).
    /// For callers with one session at a time: what happens to other sessions meanwhile is not reported.
    pub async fn forward(
        &mut self,
        session: SessionId,
        tokens: &[u32],
    ) -> Result<Vec<f32>, RingError> {
        let mut chunks = tokens.chunks(MAX_FRAME_ROWS).peekable();
        let mut in_flight = 0;
        let mut last = Vec::new();
        while in_flight > 0 || chunks.peek().is_some() {
            if in_flight <= self.members
                && let Some(chunk) = chunks.next()
            {
                let wanted = usize::from(chunks.peek().is_none());
                self.send(session, chunk, wanted).await?;
                in_flight += 1;
                continue;
            }
            match self.next_for(session).await? {
                RingEvent::Answer { output, .. } => {
                    in_flight -= 1;
                    last = output;
                }
                RingEvent::Refused { reason, .. } => return Err(RingError::Refused { reason }),
                RingEvent::Lost { rank, cause, .. } => {
                    return Err(RingError::Lost { rank, cause });
                }
                RingEvent::Released { .. } | RingEvent::Whole { .. } | RingEvent::Busy => {}
            }
        }
        Ok(last)
    }

    /// Probes until the ring is whole.
    pub async fn ready(&mut self) -> Result<(), RingError> {
        const PAUSE: Duration = Duration::from_millis(50);
        let limit = Instant::now() + PATIENCE;
        while Instant::now() < limit {
            self.last_nonce += 1;
            let probe = self.last_nonce;
            self.probe(probe).await?;
            let answer = tokio::time::timeout(PAUSE, async {
                loop {
                    match self.next().await {
                        Some(RingEvent::Whole { nonce }) if nonce == probe => return Ok(()),
                        Some(_) => {}
                        None => return Err(RingError::Stopped),
                    }
                }
            });
            if let Ok(answer) = answer.await {
                return answer;
            }
        }
        Err(RingError::Deadline { limit: PATIENCE })
    }

    async fn next_for(&mut self, session: SessionId) -> Result<RingEvent, RingError> {
        let wait = async {
            loop {
                match self.next().await {
                    None => return Err(RingError::Stopped),
                    Some(
                        RingEvent::Answer { session: other, .. }
                        | RingEvent::Refused { session: other, .. },
                    ) if other != session => {}
                    Some(event) => return Ok(event),
                }
            }
        };
        tokio::time::timeout(PATIENCE, wait)
            .await
            .unwrap_or(Err(RingError::Deadline { limit: PATIENCE }))
    }

    /// The event for decode; `None` if its session is closed already.
    fn event(&mut self, reply: Reply) -> Option<RingEvent> {
        match reply {
            Reply::Answer {
                session,
                sequence,
                output,
                timings,
            } => {
                let Some(open) = self.sessions.get_mut(&session) else {
                    // Of a session that is closed: nobody's, but the ring gets on.
                    return Some(RingEvent::Busy);
                };
                let in_flight = &mut open.in_flight;
                // Frames of a session come home in order.
                let InFlight { begun, rows, .. } = in_flight
                    .pop_front()
                    .filter(|oldest| oldest.sequence == sequence)?;
                self.heard.came_home(begun);
                Some(RingEvent::Answer {
                    session,
                    output,
                    cost: RoundCost {
                        elapsed: begun.elapsed(),
                        rows,
                        members: timings,
                    },
                })
            }
            Reply::Released { session } => Some(RingEvent::Released { session }),
            Reply::Whole { nonce } => Some(RingEvent::Whole { nonce }),
            Reply::Event(event) => match event.event {
                MemberEvent::Refused {
                    session, refusal, ..
                } => self
                    .sessions
                    .contains_key(&session)
                    .then(|| RingEvent::Refused {
                        session,
                        rank: event.rank,
                        reason: format!("rank {}: {refusal}", event.rank),
                    }),
                MemberEvent::Failed { session, cause, .. } => self
                    .sessions
                    .contains_key(&session)
                    .then(|| RingEvent::Refused {
                        session,
                        rank: event.rank,
                        reason: format!("rank {}: {cause}", event.rank),
                    }),
                MemberEvent::Unreachable { rank, cause } => {
                    self.sessions.clear();
                    self.heard.forget();
                    let (rank, by) = match rank {
                        // Rank 0 is here: what is lost is whoever does not reach it.
                        0 => (event.rank.max(1), 0),
                        _ => (rank, event.rank),
                    };
                    Some(RingEvent::Lost {
                        rank,
                        missed_by: (by != rank).then_some(by),
                        cause,
                    })
                }
                MemberEvent::Busy => Some(RingEvent::Busy),
                MemberEvent::Alive => {
                    self.heard.note(event.rank, Instant::now());
                    None
                }
            },
        }
    }

    fn open(&mut self, session: SessionId, length: usize) {
        let open = Open {
            length,
            sequence: 0,
            in_flight: VecDeque::new(),
        };
        self.sessions.insert(session, open);
    }

    fn session(&mut self, session: SessionId) -> Result<&mut Open, RingError> {
        self.sessions
            .get_mut(&session)
            .ok_or(RingError::NoSession { session })
    }

    async fn operate(&mut self, session: SessionId, operation: Operation) -> Result<(), RingError> {
        self.operate_for(session, operation, Output::Logits, String::new())
            .await
    }

    async fn operate_for(
        &mut self,
        session: SessionId,
        operation: Operation,
        output: Output,
        traceparent: String,
    ) -> Result<(), RingError> {
        let open = self.session(session)?;
        open.sequence += 1;
        let frame = Frame {
            session,
            sequence: open.sequence,
            round: 0,
            traceparent,
            timings: Vec::with_capacity(self.members),
            operation,
        };
        self.begin(frame, output).await
    }

    async fn begin(&self, frame: Frame, output: Output) -> Result<(), RingError> {
        // Nobody takes it while rank 0 is at a long pass, which is waiting, too.
        let begun = Instant::now();
        let begin = Inbound::Begin {
            frame,
            output,
            begun,
        };
        self.inbox.send(begin).await.map_err(|_| RingError::Stopped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::test_plan::plan;

    #[tokio::test]
    async fn a_frame_tells_since_when_it_waits_at_rank_0() {
        let (inbox, mut received) = mpsc::channel(1);
        let (_home, replies) = mpsc::unbounded_channel();
        let mut client = RingClient::new(inbox, replies, 1);
        client.create(1).await.unwrap();
        let sent = Instant::now();
        let Some(Inbound::Begin { begun, .. }) = received.recv().await else {
            panic!("a frame begins");
        };
        assert!(begun <= sent);
    }

    #[test]
    fn members_of_one_machine_share_its_time() {
        let mut plan = plan(6, 3, 1, &[2, 4]);
        let addresses = ["a:1", "b:1", "a:2"];
        for (member, address) in plan.members.iter_mut().zip(addresses) {
            member.address = address.into();
        }
        let timing = |rank, compute_ns| HopTiming {
            rank,
            compute_ns,
            wait_ns: 10,
            ..HopTiming::default()
        };
        let mut cost = RoundCost {
            elapsed: Duration::from_nanos(100),
            rows: 1,
            members: vec![timing(0, 5), timing(1, 7), timing(2, 4), timing(9, 99)],
        };
        assert_eq!(cost.slowest_machine(&plan), Duration::from_nanos(9));
        assert_eq!(cost.without_waiting(), Duration::from_nanos(60));
        cost.members[1].streamed_bytes = 1;
        assert_eq!(cost.slowest_machine(&plan), Duration::from_nanos(60));
    }
}
