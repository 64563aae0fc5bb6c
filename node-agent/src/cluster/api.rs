//! What all requests to the API server have in common: the field manager, a deadline, and how a refusal is reported.

use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use kube::api::{ApiResource, DynamicObject};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use prima_crds::WATCH_SECONDS;
pub use prima_kubernetes::reason;

/// For everything that only an agent writes.
pub const FIELD_MANAGER: &str = "prima-node-agent";

/// For one request's answer.
pub const DEADLINE: Duration = Duration::from_secs(10);

/// Whether the API server answered with this HTTP status.
pub fn is_status(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

/// All objects of the kind `K`, in all namespaces, as they come and go. They are not parsed: one that a newer operator wrote must not end
/// the watch of the others. Failures are logged and tried again.
pub fn watch_all<K>(client: Client) -> BoxStream<'static, Event<DynamicObject>>
where
    K: Resource<DynamicType = ()>,
{
    let resource = ApiResource::erase::<K>(&());
    let kind = resource.kind.clone();
    let objects: Api<DynamicObject> = Api::all_with(client, &resource);
    watcher(objects, watcher::Config::default().timeout(WATCH_SECONDS))
        .default_backoff()
        .filter_map(move |event| {
            let event = event
                .inspect_err(|error| {
                    tracing::warn!(
                        kind,
                        problem = prima_crds::error_chain(error),
                        "the watch failed; trying again"
                    );
                })
                .ok();
            std::future::ready(event)
        })
        .boxed()
}
