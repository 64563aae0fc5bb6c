//! Members that vanish, clients that hang up, neighbours that do not follow the protocol: always a clear answer, never
//! a hang, and nothing left behind.

use std::sync::Arc;
use std::time::Duration;

use prima_engine::Model;
use prima_node_agent::ring::proto::frame::Operation;
use prima_node_agent::ring::proto::hop_event::Event;
use prima_node_agent::ring::proto::ring_client::RingClient as Stub;
use prima_node_agent::ring::proto::ring_server::{Ring as RingService, RingServer};
use prima_node_agent::ring::proto::{self, Frame, HopEvent};
use prima_node_agent::ring::{
    GENERATION_KEY, HopError, Member, MemberError, RANK_KEY, RingClient, RingError, RingEvent,
};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

use crate::harness::{
    GENERATION, ModelFile, Ring, bits, in_time, member, open, plan, tokens, until,
};

#[tokio::test]
async fn sessions_of_a_lost_member_end_everywhere() {
    let file = ModelFile::made_up();
    let text = tokens(30);
    let expected = file.logits(&text).pop().unwrap();
    for lost in 1..4 {
        let planned = plan(&file.path, file.layers(), 4, &[1, 2, 3, 5]);
        let (mut ring, mut client) = Ring::start(&file.model, planned);
        in_time(client.ready()).await.unwrap();
        let session = open(&mut client).await;
        client.forward(session, &text).await.unwrap();
        assert_eq!(ring.sessions(), [1, 1, 1, 1]);

        // Sockets break as they do when the process is killed.
        drop(ring.members.remove(lost));
        let event = loop {
            match in_time(client.next()).await {
                // Of the pass before, if that took long.
                Some(RingEvent::Busy) => {}
                other => break other,
            }
        };
        // Whichever of its neighbours says so first.
        let neighbours = [lost - 1, (lost + 1) % 4];
        assert!(
            matches!(event, Some(RingEvent::Lost { rank, missed_by: Some(by), .. }) if rank == lost && neighbours.contains(&by)),
            "{lost}: {event:?}"
        );
        assert_eq!(
            client.send(session, &text, 1).await,
            Err(RingError::NoSession { session })
        );
        client.probe(99).await.unwrap();
        until("the others have released the session", || {
            ring.sessions() == [0, 0, 0]
        })
        .await;

        let listener = std::net::TcpListener::bind(&ring.plan.members[lost].address).unwrap();
        ring.members
            .insert(lost, member(&file.model, &ring.plan, lost, listener));
        in_time(client.ready()).await.unwrap();
        let session = open(&mut client).await;
        let logits = in_time(client.forward(session, &text)).await.unwrap();
        assert!(bits(&logits) == bits(&expected));
    }
}

/// Its file is cut under it, so nothing that it computes from then on is right.
#[tokio::test]
async fn a_member_that_cannot_go_on_says_why_and_ends() {
    let file = ModelFile::made_up();
    let own = file.path.with_file_name("own.gguf");
    std::fs::copy(&file.path, &own).unwrap();
    let cut = Model::open(&own).unwrap();
    let planned = plan(&file.path, file.layers(), 3, &[1, 3, 5]);
    let (ring, mut client) = Ring::start_each(planned, |plan, rank, listener| {
        let model = if rank == 1 { &cut } else { &file.model };
        member(model, plan, rank, listener)
    });
    in_time(client.ready()).await.unwrap();
    let session = open(&mut client).await;
    let text = tokens(5);
    in_time(client.forward(session, &text)).await.unwrap();
    let opened = std::fs::OpenOptions::new().write(true).open(&own);
    opened.unwrap().set_len(4096).unwrap();

    let mut cause = match in_time(client.forward(session, &text)).await.unwrap_err() {
        RingError::Lost { rank: 1, cause } => cause,
        other => panic!("{other}"),
    };
    // It has said why before its streams ended; on a busy machine others may be heard sooner, which have only lost it.
    in_time(async {
        while !cause.contains("could not be read") {
            match client.next().await {
                Some(RingEvent::Lost {
                    rank: 1,
                    cause: next,
                    ..
                }) => cause = next,
                Some(_) => {}
                None => panic!("the ring has stopped: {cause}"),
            }
        }
    })
    .await;
    let ended = in_time(ring.members[1].ended()).await;
    assert!(
        matches!(*ended, MemberError::Hop(HopError::Lasting(_))),
        "{ended}"
    );
    assert!(ended.without_gpu().is_none());
}

/// Whoever is behind a link that stands still is silent; a pause as short as that costs nothing.
#[tokio::test]
async fn a_link_that_stands_still_is_noticed_and_breaks_nothing() {
    let file = ModelFile::made_up();
    let mut planned = plan(&file.path, file.layers(), 3, &[1, 2, 3, 4, 4, 5]);
    let mut links = Vec::new();
    for member in &mut planned.plan.members {
        let (still, follow) = watch::channel(false);
        member.address = link(member.address.clone(), follow).await;
        links.push(still);
    }
    let (_ring, mut client) = Ring::start(&file.model, planned);
    in_time(client.ready()).await.unwrap();
    let text = tokens(20);
    let expected = file.logits(&text);
    let session = open(&mut client).await;
    in_time(client.forward(session, &text[..5])).await.unwrap();
    // Until all have been heard of, several times.
    tokio::time::sleep(Duration::from_secs(3)).await;
    // The last member's link leads to rank 0.
    for (still, (silent, end)) in links.iter().zip([(2, 10), (1, 15), (2, 20)]) {
        still.send_replace(true);
        until_silent(&mut client, Some(silent)).await;
        still.send_replace(false);
        until_silent(&mut client, None).await;
        let logits = in_time(client.forward(session, &text[end - 5..end])).await;
        assert!(bits(&logits.unwrap()) == bits(&expected[end - 1]));
    }
}

/// Asks as rank 0 does.
async fn until_silent(client: &mut RingClient, expected: Option<usize>) {
    in_time(async {
        loop {
            while client.try_next().is_some() {}
            if client.silent() == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await;
}

/// A way to this address that carries nothing while `still` is true. Returns where it begins.
async fn link(to: String, still: watch::Receiver<bool>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((from, _)) = listener.accept().await {
            let to = TcpStream::connect(&to).await.unwrap();
            let ((from, back), (answers, to)) = (from.into_split(), to.into_split());
            tokio::spawn(carry(from, to, still.clone()));
            tokio::spawn(carry(answers, back, still.clone()));
        }
    });
    address
}

async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut still: watch::Receiver<bool>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    let mut bytes = vec![0_u8; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        let goes_on = still.wait_for(|still| !still).await.is_ok();
        if !goes_on || to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn a_release_frees_every_member_even_with_answers_on_their_way() {
    let file = ModelFile::made_up();
    let (ring, mut client) = Ring::start(
        &file.model,
        plan(&file.path, file.layers(), 3, &[1, 2, 3, 4, 5, 5]),
    );
    in_time(client.ready()).await.unwrap();
    let stays = open(&mut client).await;
    client.forward(stays, &tokens(5)).await.unwrap();
    let goes = open(&mut client).await;
    for chunk in tokens(300).chunks(100) {
        client.send(goes, chunk, 1).await.unwrap();
    }
    client.release(goes).await.unwrap();
    // Of answers to a closed session is told only that the ring gets on: of each of the three. A member that computes for long says so, too.
    let mut told = 0;
    let released = loop {
        match in_time(client.next()).await {
            Some(RingEvent::Busy) => told += 1,
            other => break other,
        }
    };
    assert!(told >= 3, "{told}");
    assert!(
        matches!(released, Some(RingEvent::Released { session }) if session == goes),
        "{released:?}"
    );
    assert_eq!(ring.sessions(), [1, 1, 1]);
    assert!(client.forward(stays, &[1]).await.is_ok());
}

#[tokio::test]
async fn what_the_ring_cannot_hold_is_refused_and_the_rest_goes_on() {
    let file = ModelFile::made_up();
    let (ring, mut client) = Ring::start(&file.model, plan(&file.path, file.layers(), 2, &[2, 5]));
    in_time(client.ready()).await.unwrap();
    let mut sessions = Vec::new();
    for _ in 0..16 {
        sessions.push(open(&mut client).await);
    }
    let one_more = open(&mut client).await;
    let refused = in_time(client.forward(one_more, &[1])).await.unwrap_err();
    assert!(
        refused.to_string().contains("at most 16 sessions"),
        "{refused}"
    );
    client.release(one_more).await.unwrap();

    let unknown = in_time(client.forward(sessions[1], &[4711]))
        .await
        .unwrap_err();
    assert!(unknown.to_string().contains("4711"), "{unknown}");
    client.release(sessions[1]).await.unwrap();

    for chunk in tokens(512).chunks(128) {
        in_time(client.forward(sessions[0], chunk)).await.unwrap();
    }
    let full = in_time(client.forward(sessions[0], &[1]))
        .await
        .unwrap_err();
    assert!(full.to_string().contains("context length 512"), "{full}");
    assert!(in_time(client.forward(sessions[2], &[1])).await.is_ok());
    until("two sessions are gone", || ring.sessions() == [15, 15]).await;
}

/// A real member of rank 1 between a predecessor and a successor that the test plays.
struct Between {
    member: Member,
    address: String,
    /// Frames to the member.
    frames: mpsc::Sender<Frame>,
    /// What it tells back.
    events: Streaming<HopEvent>,
    /// What it hands on.
    handed_on: mpsc::Receiver<Frame>,
}

/// Rank 0 as the member's successor: collects what arrives.
struct Collector(mpsc::Sender<Frame>);

#[tonic::async_trait]
impl RingService for Collector {
    type HopStream = ReceiverStream<Result<HopEvent, Status>>;

    async fn hop(
        &self,
        request: Request<Streaming<Frame>>,
    ) -> Result<Response<Self::HopStream>, Status> {
        let mut frames = request.into_inner();
        let (told, events) = mpsc::channel(1);
        let collected = self.0.clone();
        tokio::spawn(async move {
            while let Ok(Some(frame)) = frames.message().await {
                if collected.send(frame).await.is_err() {
                    break;
                }
            }
            drop(told);
        });
        Ok(Response::new(ReceiverStream::new(events)))
    }
}

impl Between {
    async fn start(file: &ModelFile) -> Self {
        let planned = plan(&file.path, file.layers(), 2, &[1, 2, 4, 5]);
        let plan = Arc::new(planned.plan);
        let mut listeners = planned.listeners.into_iter();
        let (own, members) = (listeners.next().unwrap(), listeners.next().unwrap());
        let address = plan.members[1].address.clone();

        let (collected, mut handed_on) = mpsc::channel(64);
        own.set_nonblocking(true).unwrap();
        let own = TcpListenerStream::new(tokio::net::TcpListener::from_std(own).unwrap());
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(RingServer::new(Collector(collected)))
                .serve_with_incoming(own),
        );
        let member = member(&file.model, &plan, 1, members);
        let (frames, events) = Self::connect(&address).await.unwrap();

        // Until the member is connected to the collector, it drops what it cannot hand on.
        loop {
            let reset = Operation::Reset(proto::Reset {
                nonce: 1,
                ..Default::default()
            });
            frames
                .send(Frame {
                    generation: GENERATION,
                    operation: Some(reset),
                    ..Default::default()
                })
                .await
                .unwrap();
            if tokio::time::timeout(Duration::from_millis(100), handed_on.recv())
                .await
                .is_ok()
            {
                break;
            }
        }
        while handed_on.try_recv().is_ok() {}
        let mut between = Self {
            member,
            address,
            frames,
            events,
            handed_on,
        };
        between
            .send(7000, 1, Operation::Create(proto::Create {}))
            .await;
        between.arrives(7000).await;
        between
    }

    async fn connect(address: &str) -> Result<(mpsc::Sender<Frame>, Streaming<HopEvent>), Status> {
        let mut stub = Stub::connect(format!("http://{address}")).await.unwrap();
        let (frames, received) = mpsc::channel(64);
        let mut request = Request::new(ReceiverStream::new(received));
        request
            .metadata_mut()
            .insert(GENERATION_KEY, GENERATION.into());
        request.metadata_mut().insert(RANK_KEY, 0usize.into());
        Ok((frames, stub.hop(request).await?.into_inner()))
    }

    async fn send(&self, session: u64, sequence: u64, operation: Operation) {
        self.frames
            .send(Frame {
                session,
                generation: GENERATION,
                sequence,
                operation: Some(operation),
                ..Default::default()
            })
            .await
            .unwrap();
    }

    /// Waits for the next frame of `session` to be handed on.
    async fn arrives(&mut self, session: u64) -> Frame {
        loop {
            let frame = in_time(self.handed_on.recv()).await.unwrap();
            if frame.session == session {
                return frame;
            }
        }
    }

    async fn refusal(&mut self) -> (u64, String, String) {
        loop {
            match in_time(self.events.message())
                .await
                .unwrap()
                .unwrap()
                .event
                .unwrap()
            {
                Event::Refused(refused) => {
                    return (
                        refused.session,
                        refused.field,
                        format!("expected {}, found {}", refused.expected, refused.found),
                    );
                }
                // From the time before the collector was connected.
                Event::Unreachable(_) | Event::Busy(_) | Event::Alive(_) => {}
                Event::Failed(failed) => panic!("{failed:?}"),
            }
        }
    }
}

fn rows(count: u32, first_position: u64) -> proto::Activation {
    proto::Activation {
        first_position,
        rows: count,
        hidden: 256,
        dtype: proto::Dtype::F32.into(),
        output_rows: 0,
        refuted: false,
        payload: vec![0; count as usize * 256 * 4].into(),
    }
}

#[tokio::test]
async fn frames_that_break_a_rule_are_never_computed() {
    let file = ModelFile::made_up();
    let mut between = Between::start(&file).await;
    let frame = |operation| Frame {
        session: 7000,
        generation: GENERATION,
        sequence: 2,
        operation: Some(operation),
        ..Default::default()
    };
    let activation = |change: fn(&mut proto::Activation)| {
        let mut activation = rows(2, 0);
        change(&mut activation);
        frame(Operation::Activation(activation))
    };
    let valid = activation(|_| {});
    let bad = [
        (
            "generation",
            Frame {
                generation: GENERATION - 1,
                ..valid.clone()
            },
        ),
        (
            "round",
            Frame {
                round: 2,
                ..valid.clone()
            },
        ),
        (
            "session",
            Frame {
                session: 0,
                ..valid.clone()
            },
        ),
        (
            "session",
            Frame {
                session: 4711,
                ..valid.clone()
            },
        ),
        (
            "sequence",
            Frame {
                sequence: 1,
                ..valid.clone()
            },
        ),
        (
            "operation",
            Frame {
                operation: None,
                ..valid.clone()
            },
        ),
        (
            "timings",
            Frame {
                timings: vec![proto::HopTiming::default(); 3],
                ..valid.clone()
            },
        ),
        ("activation.rows", activation(|a| a.rows = 0)),
        ("activation.rows", activation(|a| a.rows = u32::MAX)),
        ("activation.hidden", activation(|a| a.hidden = 255)),
        (
            "activation.dtype",
            activation(|a| a.dtype = proto::Dtype::Bf16.into()),
        ),
        (
            "activation.payload",
            activation(|a| a.payload = vec![0; 7].into()),
        ),
        ("activation.output_rows", activation(|a| a.output_rows = 3)),
        (
            "activation.first_position",
            activation(|a| a.first_position = 1),
        ),
        (
            "truncate.positions",
            frame(Operation::Truncate(proto::Truncate { positions: 1 })),
        ),
        (
            "fork.child",
            frame(Operation::Fork(proto::Fork { child: 7000 })),
        ),
        (
            "session",
            Frame {
                sequence: 1,
                ..frame(Operation::Create(proto::Create {}))
            },
        ),
    ];
    for (field, frame) in bad {
        let session = frame.session;
        between.frames.send(frame).await.unwrap();
        let (refused, found, why) = between.refusal().await;
        assert_eq!((refused, found.as_str()), (session, field), "{why}");
    }

    // After all that the session stands where it stood: the valid frame is computed, and its replay is not.
    between.frames.send(valid.clone()).await.unwrap();
    let computed = between.arrives(7000).await;
    assert_eq!(
        (computed.round, computed.sequence, computed.timings.len()),
        (1, 2, 1)
    );
    between.frames.send(valid).await.unwrap();
    assert_eq!(between.refusal().await.1, "sequence");
    assert!(
        between.handed_on.try_recv().is_err(),
        "nothing refused was handed on"
    );
    assert_eq!(between.member.sessions(), 1);
}

#[tokio::test]
async fn an_oversized_message_ends_only_its_stream() {
    let file = ModelFile::made_up();
    let mut between = Between::start(&file).await;
    between
        .send(7000, 2, Operation::Activation(rows(200, 0)))
        .await;
    // Not even read; what comes back is the end of the stream.
    while let Ok(Some(event)) = in_time(between.events.message()).await {
        assert!(
            matches!(event.event, Some(Event::Unreachable(_) | Event::Alive(_))),
            "{event:?}"
        );
    }
    let told = between.arrives(0).await;
    assert!(
        matches!(told.operation, Some(Operation::Reset(reset)) if reset.nonce == 0 && reset.lost_rank == 0)
    );
    until("its session is gone", || between.member.sessions() == 0).await;
    let (frames, events) = in_time(async {
        loop {
            if let Ok(stream) = Between::connect(&between.address).await {
                return stream;
            }
        }
    })
    .await;
    (between.frames, between.events) = (frames, events);
    between
        .send(1, 1, Operation::Create(proto::Create {}))
        .await;
    between.arrives(1).await;
}

#[tokio::test]
async fn strangers_do_not_disturb_a_ring() {
    use tokio::io::AsyncWriteExt as _;

    let file = ModelFile::made_up();
    let (ring, mut client) = Ring::start(&file.model, plan(&file.path, file.layers(), 2, &[2, 5]));
    in_time(client.ready()).await.unwrap();
    let session = open(&mut client).await;
    let text = tokens(20);
    let expected = file.logits(&text);
    in_time(client.forward(session, &text[..10])).await.unwrap();

    let address = &ring.plan.members[1].address;
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xff; 10_000],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        let mut stranger = tokio::net::TcpStream::connect(address).await.unwrap();
        stranger.write_all(garbage).await.unwrap();
    }
    let impostor = Between::connect(address).await.unwrap_err();
    assert_eq!(impostor.code(), tonic::Code::AlreadyExists, "{impostor}");
    let stranger = Stub::connect(format!("http://{address}"))
        .await
        .unwrap()
        .hop(tokio_stream::empty())
        .await
        .unwrap_err();
    assert_eq!(
        stranger.code(),
        tonic::Code::FailedPrecondition,
        "{stranger}"
    );

    let logits = in_time(client.forward(session, &text[10..])).await.unwrap();
    assert!(bits(&logits) == bits(&expected[19]));
}
