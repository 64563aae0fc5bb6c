//! Events of Models.

use kube::Resource;
use kube::runtime::events::{Event, EventType, Recorder};
use prima_crds::v1alpha1::model::Model;

/// Tells people who look at the Model. An event that cannot be written is no reason to fail.
pub async fn event(model: &Model, recorder: &Recorder, type_: EventType, reason: &str, note: &str) {
    let event = Event {
        type_,
        reason: reason.to_owned(),
        // The API server takes no more.
        note: Some(note.chars().take(1000).collect()),
        action: "Reconcile".to_owned(),
        secondary: None,
    };
    if let Err(error) = recorder.publish(&event, &model.object_ref(&())).await {
        tracing::warn!(%error, reason, "could not write an event");
    }
}
