//! Events of Models.

use std::time::Duration;

use kube::Resource;
use kube::runtime::events::{Event, EventType, Recorder};
use prima_crds::v1alpha1::model::Model;
use tokio::time::timeout;

/// For what nothing depends on.
const PATIENCE: Duration = Duration::from_secs(5);

/// Tells people who look at the Model. An event that cannot be written is no reason to fail, nor to wait for long.
pub async fn event(model: &Model, recorder: &Recorder, type_: EventType, reason: &str, note: &str) {
    let event = Event {
        type_,
        reason: reason.to_owned(),
        // The API server takes no more.
        note: Some(note.chars().take(1000).collect()),
        action: "Reconcile".to_owned(),
        secondary: None,
    };
    let model = model.object_ref(&());
    match timeout(PATIENCE, recorder.publish(&event, &model)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, reason, "could not write an event"),
        Err(_) => tracing::warn!(reason, "could not write an event in time"),
    }
}
