//! Models as the API server has them. One that this version cannot read must not hide the others: a field may have a value of the next version,
//! and stays in the store when that is rolled back.

use std::future;

use futures::{Stream, StreamExt};
use kube::api::DynamicObject;
use kube::runtime::watcher::{self, Event};
use kube::{Client, ResourceExt};
use prima_crds::error_chain;
use prima_crds::v1alpha1::model::Model;
use serde_json::json;

use super::world::untyped;

/// All Models as they come and go. One that cannot be read is as if it were not there: its ring goes on, and nobody looks after it.
pub fn all(client: &Client) -> impl Stream<Item = watcher::Result<Event<Model>>> + Send + 'static {
    untyped::<Model>(client).filter_map(|event| future::ready(event.map(of_model).transpose()))
}

fn of_model(event: Event<DynamicObject>) -> Option<Event<Model>> {
    Some(match event {
        Event::Init => Event::Init,
        Event::InitApply(object) => Event::InitApply(read(&object)?),
        Event::InitDone => Event::InitDone,
        Event::Apply(object) => match read(&object) {
            Some(model) => Event::Apply(model),
            // What is known of it does not hold any more.
            None => Event::Delete(by_name(object)?),
        },
        Event::Delete(object) => Event::Delete(by_name(object)?),
    })
}

/// Reads a Model. It comes without a status that this version cannot read; if it cannot read what is wanted, there is nothing.
fn read(object: &DynamicObject) -> Option<Model> {
    match object.clone().try_parse() {
        Ok(model) => Some(model),
        Err(error) => {
            tracing::warn!(
                model = object.name_any(),
                namespace = object.namespace(),
                problem = error_chain(&error),
                "a Model is of another version than this operator; update the operator"
            );
            let mut without_status = object.clone();
            without_status.data.as_object_mut()?.remove("status");
            without_status.try_parse().ok()
        }
    }
}

/// One that is gone: nobody reads more of it than who it was.
fn by_name(mut object: DynamicObject) -> Option<Model> {
    object.data = json!({"spec": {"source": {}}});
    object.try_parse().ok()
}

#[cfg(test)]
mod tests {
    use kube::runtime::reflector;

    use super::*;
    use crate::model_controller::test_world;

    fn object(model: &Model) -> DynamicObject {
        serde_json::from_value(serde_json::to_value(model).unwrap()).unwrap()
    }

    #[test]
    fn a_model_is_there_while_it_can_be_read() {
        let known = object(&test_world::model().0);
        let mut newer = known.clone();
        newer.data["spec"]["kvDtype"] = json!("of the next version");
        let (store, mut writer) = reflector::store();
        let mut models_after = |event| {
            if let Some(event) = of_model(event) {
                writer.apply_watcher_event(&event);
            }
            store.state().len()
        };
        models_after(Event::Init);
        assert_eq!(models_after(Event::InitApply(newer.clone())), 0);
        assert_eq!(models_after(Event::InitDone), 0);
        assert_eq!(models_after(Event::Apply(known.clone())), 1);
        assert_eq!(models_after(Event::Apply(newer.clone())), 0);
        assert_eq!(models_after(Event::Apply(known.clone())), 1);
        assert_eq!(models_after(Event::Delete(newer)), 0);
    }

    #[test]
    fn a_status_that_cannot_be_read_is_left_out() {
        let model = test_world::model().0;
        let mut newer = object(&model);
        newer.data["status"] = json!({"conditions": "all of them"});
        let found = read(&newer).unwrap();
        assert_eq!((found.spec, found.status), (model.spec, None));
    }
}
