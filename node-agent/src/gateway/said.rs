//! Conversations that are kept for whoever names the last answer, or items of one, instead of sending them again: the latest ones, within a
//! bound. Whoever names items names the first ones of a conversation with every turn, while each answer keeps the whole conversation once
//! more. So items have room of their own, and outlast the conversations that they were said in.
//!
//! It is searched where requests are read, for large ones by a thread that may stop at any moment ([`crate::idle_thread`]). So nobody holds
//! the lock while searching: who searches takes all that is kept then, of which the next one who keeps something makes a copy.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use serde_json::Value;

use super::request::{MAX_VALUES, values_at_most};

/// Bytes of all conversations together.
const MAX_BYTES: usize = 12 << 20;
/// Bytes of all items together. An answer's take a few thousand.
const MAX_ITEM_BYTES: usize = 4 << 20;

/// The latest conversations and items.
pub struct Said(Mutex<Arc<Kept>>);

#[derive(Clone)]
struct Kept {
    conversations: Latest<Arc<Conversation>>,
    items: Latest<Arc<Item>>,
}

/// A conversation up to and with an answer, as JSON: its values would take many times as much memory.
struct Conversation {
    id: String,
    keyspace: u64,
    /// As a chat's.
    messages: Bytes,
    /// What was answered.
    response: Bytes,
}

/// Of a response, as JSON.
struct Item {
    id: String,
    keyspace: u64,
    json: Bytes,
}

impl Default for Said {
    fn default() -> Self {
        Self(Mutex::new(Arc::new(Kept {
            conversations: Latest::within(MAX_BYTES),
            items: Latest::within(MAX_ITEM_BYTES),
        })))
    }
}

impl Said {
    /// Keeps a conversation and the response that it ends with; the oldest ones give way to it.
    pub fn keep(&self, id: String, keyspace: u64, messages: Vec<Value>, response: &Value) {
        let output = response["output"].as_array().into_iter().flatten();
        let items = output.filter_map(|item| {
            Some(Item {
                id: item["id"].as_str()?.to_owned(),
                keyspace,
                json: text(item),
            })
        });
        let items: Vec<Item> = items.collect();
        let conversation = Conversation {
            id,
            keyspace,
            messages: text(&Value::Array(messages)),
            response: text(response),
        };
        // It could not be read again within the memory that a request may take.
        let is_too_much = values_at_most(&conversation.messages) > MAX_VALUES;
        let mut lock = self.lock();
        let kept = Arc::make_mut(&mut lock);
        for item in items {
            let bytes = item.id.len() + item.json.len();
            kept.items.keep(Arc::new(item), bytes);
        }
        if !is_too_much {
            let bytes = conversation.bytes();
            kept.conversations.keep(Arc::new(conversation), bytes);
        }
    }

    /// The messages of the conversation that ends with this response, for those who may see it.
    pub fn messages(&self, id: &str, keyspace: u64) -> Option<Vec<Value>> {
        let messages = self.find(id, keyspace, |found| found.messages.clone())?;
        serde_json::from_slice(&messages).ok()
    }

    /// This response as JSON, for those who may see it.
    pub fn response(&self, id: &str, keyspace: u64) -> Option<Bytes> {
        self.find(id, keyspace, |found| found.response.clone())
    }

    /// Those of the items of responses, by their ids, for those who may see them.
    pub fn items(&self, ids: &HashSet<&str>, keyspace: u64) -> HashMap<String, Value> {
        let found: Vec<(String, Bytes)> = {
            let kept = self.kept();
            let own = kept.items.iter().filter(|item| item.keyspace == keyspace);
            let named = own.filter(|item| ids.contains(item.id.as_str()));
            let texts = named.map(|item| (item.id.clone(), item.json.clone()));
            texts.collect()
        };
        let read = found
            .into_iter()
            .filter_map(|(id, item)| Some((id, serde_json::from_slice(&item).ok()?)));
        read.collect()
    }

    fn find(&self, id: &str, keyspace: u64, part: fn(&Conversation) -> Bytes) -> Option<Bytes> {
        let kept = self.kept();
        let found = kept
            .conversations
            .iter()
            .find(|one| one.id == id && one.keyspace == keyspace)?;
        Some(part(found))
    }

    /// What is kept now.
    fn kept(&self) -> Arc<Kept> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Conversation {
    fn bytes(&self) -> usize {
        self.id.len() + self.messages.len() + self.response.len()
    }
}

/// The latest of what comes, as far as there is room.
#[derive(Clone)]
struct Latest<T> {
    room: usize,
    /// Of all that is kept.
    bytes: usize,
    kept: VecDeque<(T, usize)>,
}

impl<T> Latest<T> {
    fn within(room: usize) -> Self {
        Self {
            room,
            bytes: 0,
            kept: VecDeque::new(),
        }
    }

    /// The oldest ones give way to it, unless it had no room without them either.
    fn keep(&mut self, one: T, bytes: usize) {
        if bytes > self.room {
            return;
        }
        self.kept.push_back((one, bytes));
        self.bytes += bytes;
        while self.bytes > self.room
            && let Some((_, freed)) = self.kept.pop_front()
        {
            self.bytes -= freed;
        }
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.kept.iter().map(|(one, _)| one)
    }
}

/// Without the room in which a text grows.
fn text(value: &Value) -> Bytes {
    let mut text = value.to_string();
    text.shrink_to_fit();
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_conversation_is_kept_for_its_own_key_only() {
        let said = Said::default();
        let response = json!({"id": "a"});
        said.keep("a".into(), 1, vec!["m".into()], &response);
        assert_eq!(said.messages("a", 1).unwrap(), ["m"]);
        assert_eq!(said.response("a", 1).unwrap(), response.to_string());
        for (id, keyspace) in [("a", 2), ("b", 1)] {
            assert_eq!(said.messages(id, keyspace), None);
            assert_eq!(said.response(id, keyspace), None);
        }
    }

    #[test]
    fn an_item_is_found_for_its_own_key_only() {
        let said = Said::default();
        let [one, other] = ["m1", "m2"].map(|id| json!({"id": id, "type": "message"}));
        let response = json!({"output": [one, other]});
        said.keep("a".into(), 1, Vec::new(), &response);
        let ids = HashSet::from(["m2", "m3"]);
        assert_eq!(said.items(&ids, 1), HashMap::from([("m2".into(), other)]));
        assert!(said.items(&ids, 2).is_empty());
    }

    #[test]
    fn the_oldest_give_way() {
        let said = Said::default();
        let ids = ["a", "b", "c", "d", "e"];
        for id in ids {
            let message = "x".repeat(MAX_BYTES / 3).into();
            said.keep(id.into(), 1, vec![message], &json!({}));
        }
        let kept = ids.map(|id| said.messages(id, 1).is_some());
        assert_eq!(kept, [false, false, false, true, true]);
    }

    #[test]
    fn what_is_searched_stays_as_it_was_while_more_is_kept() {
        fn ids(kept: &Kept) -> Vec<String> {
            let ids = kept.conversations.iter().map(|one| one.id.clone());
            ids.collect()
        }
        let said = Said::default();
        let keep = |id: &str| {
            let message = "x".repeat(MAX_BYTES * 2 / 3).into();
            said.keep(id.into(), 1, vec![message], &json!({}));
        };
        keep("a");
        let searched = said.kept();
        keep("b");
        assert_eq!(ids(&searched), ["a"]);
        assert_eq!(ids(&said.kept()), ["b"]);
    }

    #[test]
    fn items_outlast_their_conversations() {
        let said = Said::default();
        let item = |id: &str| json!({"id": id, "content": "x".repeat(MAX_ITEM_BYTES / 3)});
        let found = |id: &str| !said.items(&HashSet::from([id]), 1).is_empty();
        for id in ["a", "b"] {
            let message = "x".repeat(MAX_BYTES / 2).into();
            said.keep(id.into(), 1, vec![message], &json!({"output": [item(id)]}));
        }
        assert_eq!(said.messages("a", 1), None);
        assert!(found("a") && found("b"));
        said.keep("c".into(), 1, Vec::new(), &json!({"output": [item("c")]}));
        assert_eq!(["a", "b", "c"].map(found), [false, true, true]);
    }

    #[test]
    fn what_is_kept_is_counted_as_it_comes_and_goes() {
        let mut latest = Latest::within(10);
        let after = [4, 4, 4, 11, 9, 1].map(|bytes| {
            latest.keep((), bytes);
            (latest.bytes, latest.iter().count())
        });
        assert_eq!(after, [(4, 1), (8, 2), (8, 2), (8, 2), (9, 1), (10, 2)]);
    }

    /// Each of these numbers takes two bytes, and more than sixty as a value.
    #[test]
    fn as_many_are_kept_as_their_texts_have_room() {
        let said = Said::default();
        let response = json!({"tools": vec![0; 100_000]});
        let first_gone = (0..).find(|nth| {
            said.keep(format!("{nth}"), 1, Vec::new(), &response);
            said.response("0", 1).is_none()
        });
        assert_eq!(first_gone, Some(MAX_BYTES / 200_000));
    }

    #[test]
    fn what_takes_too_much_memory_to_read_is_not_kept() {
        let said = Said::default();
        let messages = |values: usize| vec![Value::from(vec![0; values])];
        let response = json!({"output": [{"id": "m"}]});
        // The two arrays are values, too.
        said.keep("a".into(), 1, messages(MAX_VALUES - 2), &json!({}));
        said.keep("b".into(), 1, messages(MAX_VALUES), &response);
        assert!(said.messages("a", 1).is_some());
        assert!(said.messages("b", 1).is_none());
        // It was short.
        assert_eq!(said.items(&HashSet::from(["m"]), 1).len(), 1);
    }
}
