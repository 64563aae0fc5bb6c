//! What never comes home: a frame that a link loses, the release of a session, and a model that cannot be computed.

use std::fs::OpenOptions;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prima_engine::Model;
use prima_node_agent::decode::DecodeOptions;
use prima_node_agent::generation::{GenerationError, Readiness, SubmitError};
use prima_node_agent::ring::proto::frame::Operation;
use prima_node_agent::ring::proto::ring_client::RingClient as Stub;
use prima_node_agent::ring::proto::ring_server::{Ring as RingService, RingServer};
use prima_node_agent::ring::proto::{Frame, HopEvent};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Extensions, Request, Response, Status, Streaming};

use crate::decoding::{Answer, Served, alone, request};
use crate::harness::{CONTEXT, ModelFile, Ring, in_time, member, plan, tokens, until};
use prima_test_models::MadeUpModel;

/// Much longer than a frame takes here, on a slow machine that others use, too; and short to wait for.
const DEADLINE: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_lost_token_ends_its_request_and_the_ring_goes_on() {
    let file = ModelFile::made_up();
    let (served, link) = LossyLink::between_two_members(&file);
    served.ready().await;
    let prompt = tokens(10);
    *link.loses.lock().unwrap() = Some(is_activation);
    let answer = served.generate(request(&prompt, 5)).await;
    let Some(GenerationError::Deadline { seconds }) = answer.error else {
        panic!("{answer:?}");
    };
    // And a few times what the ring's passes took, which is no whole second unless the machine is very slow.
    let limits = DEADLINE.as_secs()..2 * DEADLINE.as_secs();
    assert!(limits.contains(&seconds), "{seconds} s");
    assert!(answer.choices.is_empty() && answer.usage.is_none());
    *link.loses.lock().unwrap() = None;
    served.answers_again(&file).await;
}

#[tokio::test]
async fn a_lost_release_frees_its_session_after_the_deadline() {
    let file = ModelFile::made_up();
    let (served, link) = LossyLink::between_two_members(&file);
    served.ready().await;
    // Nor does what mends the ring come through, until it was seen to be broken.
    *link.loses.lock().unwrap() = Some(is_release_or_reset);
    served.generate(request(&tokens(10), 5)).await;
    // This one needs all the room, so what was kept of the other goes.
    let answer = served.generate(request(&tokens(CONTEXT), 5)).await;
    // Nobody but the ring waits for it.
    assert!(answer.usage.is_some(), "{:?}", answer.error);
    let mut status = served.generator.status();
    let withdrawn = status.wait_for(|status| {
        matches!(&status.readiness, Readiness::Loading(reason) if reason == "a session got lost on the ring")
    });
    in_time(withdrawn).await.unwrap();
    *link.loses.lock().unwrap() = None;
    until("no member keeps the session", || {
        served.ring.sessions() == [0, 0]
    })
    .await;
    served.ready().await;
    served.answers_again(&file).await;
}

#[tokio::test]
async fn a_member_with_another_model_fails_the_warm_up() {
    let file = ModelFile::made_up();
    let folder = tempfile::tempdir().unwrap();
    let wider = MadeUpModel {
        hidden: 512,
        ..MadeUpModel::default()
    };
    let wider = Model::open(&wider.write(folder.path())).unwrap();

    let mut planned = plan(&file.path, file.layers(), 2, &[2, 5]);
    let plan = Arc::new(planned.plan);
    let (second, first) = (planned.listeners.pop(), planned.listeners.pop());
    let mut members = vec![
        member(&file.model, &plan, 0, first.unwrap()),
        member(&wider, &plan, 1, second.unwrap()),
    ];
    let client = members[0].take_client().unwrap();
    let served = Served::over(Ring { members, plan }, client, &file.model);
    let mut status = served.generator.status();
    let failed = status.wait_for(|status| {
        matches!(&status.readiness, Readiness::Failed(reason)
            if reason.contains("rank 1") && reason.contains("512") && reason.contains("256"))
    });
    in_time(failed).await.unwrap();
    let refused = served.generator.submit(request(&[1], 1)).await.err();
    assert!(
        matches!(refused, Some(SubmitError::NotReady { .. })),
        "{refused:?}"
    );
}

/// It is started again by whoever runs it, and opens the file anew.
#[tokio::test]
async fn a_member_whose_file_was_cut_ends_and_says_so() {
    let (file, other) = (ModelFile::made_up(), ModelFile::made_up());
    let mut planned = plan(&file.path, file.layers(), 2, &[2, 5]);
    let plan = Arc::new(planned.plan);
    let (second, first) = (planned.listeners.pop(), planned.listeners.pop());
    let mut members = vec![
        member(&file.model, &plan, 0, first.unwrap()),
        member(&other.model, &plan, 1, second.unwrap()),
    ];
    let client = members[0].take_client().unwrap();
    let served = Served::over(Ring { members, plan }, client, &file.model);
    served.ready().await;
    let cut = OpenOptions::new().write(true).open(&other.path).unwrap();
    cut.set_len(4096).unwrap();

    let answer = served.generate(request(&tokens(10), 5)).await;
    assert!(answer.error.is_some(), "{answer:?}");
    let ended = in_time(served.ring.members[1].ended()).await;
    let why = prima_crds::error_chain(&*ended);
    assert!(why.contains(&other.path.display().to_string()), "{why}");
    let mut status = served.generator.status();
    let broken = status.wait_for(|status| status.readiness != Readiness::Ready);
    in_time(broken).await.unwrap();
}

impl Served {
    async fn answers_again(&self, file: &ModelFile) {
        let prompt = tokens(10);
        let expected = alone(file, &prompt, 5);
        let answers = async {
            loop {
                self.ready().await;
                // What was lost may have broken the ring off in between.
                if let Ok(events) = self.generator.submit(request(&prompt, 5)).await {
                    break Answer::read(events).await;
                }
            }
        };
        assert_eq!(in_time(answers).await.choices[0].tokens, expected);
    }
}

/// What stands at the address of member 1 and hands on what it does not lose.
#[derive(Clone)]
struct LossyLink {
    to: String,
    loses: Arc<Mutex<Option<Loses>>>,
}

/// Whether a frame gets lost.
type Loses = fn(&Frame) -> bool;

fn is_activation(frame: &Frame) -> bool {
    matches!(frame.operation, Some(Operation::Activation(_)))
}

fn is_release_or_reset(frame: &Frame) -> bool {
    matches!(
        frame.operation,
        Some(Operation::Release(_) | Operation::Reset(_))
    )
}

impl LossyLink {
    /// A ring of two, with a short deadline.
    fn between_two_members(file: &ModelFile) -> (Served, LossyLink) {
        let mut planned = plan(&file.path, file.layers(), 2, &[2, 5]);
        let link = LossyLink {
            to: planned.plan.members[1].address.clone(),
            loses: Arc::default(),
        };
        planned.plan.kv_contexts = 1;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        planned.plan.members[1].address = listener.local_addr().unwrap().to_string();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(RingServer::new(link.clone()))
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        let (ring, client) = Ring::start(&file.model, planned);
        let options = DecodeOptions {
            grace: DEADLINE,
            ..DecodeOptions::default()
        };
        (Served::decoding(ring, client, &file.model, options), link)
    }
}

#[tonic::async_trait]
impl RingService for LossyLink {
    type HopStream = Streaming<HopEvent>;

    async fn hop(
        &self,
        request: Request<Streaming<Frame>>,
    ) -> Result<Response<Self::HopStream>, Status> {
        let (metadata, _, mut frames) = request.into_parts();
        let stub = Stub::connect(format!("http://{}", self.to)).await;
        let mut stub = stub.map_err(|error| Status::unavailable(error.to_string()))?;
        let (handed_on, received) = mpsc::channel(64);
        let loses = self.loses.clone();
        tokio::spawn(async move {
            while let Ok(Some(frame)) = frames.message().await {
                let lost = loses.lock().unwrap().is_some_and(|loses| loses(&frame));
                if !lost && handed_on.send(frame).await.is_err() {
                    break;
                }
            }
        });
        let received = ReceiverStream::new(received);
        let request = Request::from_parts(metadata, Extensions::default(), received);
        stub.hop(request).await
    }
}
