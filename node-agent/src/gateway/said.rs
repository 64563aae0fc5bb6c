//! Conversations that are kept for whoever names the last answer instead of sending them again: the latest ones, within a bound.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

/// Bytes of all conversations together, as JSON.
const MAX_BYTES: usize = 16 << 20;

/// A conversation up to and with an answer.
pub struct Conversation {
    /// As a chat's.
    pub messages: Vec<Value>,
    /// What was answered.
    pub response: Value,
}

/// The latest conversations.
#[derive(Default)]
pub struct Said(Mutex<VecDeque<Kept>>);

struct Kept {
    id: String,
    keyspace: u64,
    bytes: usize,
    conversation: Arc<Conversation>,
}

impl Said {
    /// Keeps a conversation; the oldest ones give way to it.
    pub fn keep(&self, id: String, keyspace: u64, conversation: Conversation) {
        let messages = conversation
            .messages
            .iter()
            .map(|one| one.to_string().len());
        let bytes = messages.sum::<usize>() + conversation.response.to_string().len();
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back(Kept {
            id,
            keyspace,
            bytes,
            conversation: Arc::new(conversation),
        });
        while kept.iter().map(|one| one.bytes).sum::<usize>() > MAX_BYTES {
            kept.pop_front();
        }
    }

    /// The conversation that ends with this answer, for those who may see it.
    pub fn get(&self, id: &str, keyspace: u64) -> Option<Arc<Conversation>> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = kept
            .iter()
            .find(|one| one.id == id && one.keyspace == keyspace)?;
        Some(found.conversation.clone())
    }

    /// Those of the items that answers are made of, by their ids, for those who may see them.
    pub fn items(&self, ids: &HashSet<&str>, keyspace: u64) -> HashMap<String, Value> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let own = kept.iter().filter(|one| one.keyspace == keyspace);
        let items = own.flat_map(|one| one.conversation.response["output"].as_array());
        let found = items.flatten().filter_map(|item| {
            let id = item["id"].as_str().filter(|id| ids.contains(id))?;
            Some((id.to_owned(), item.clone()))
        });
        found.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn conversation(bytes: usize) -> Conversation {
        Conversation {
            messages: vec!["x".repeat(bytes).into()],
            response: json!({}),
        }
    }

    #[test]
    fn a_conversation_is_kept_for_its_own_key_only() {
        let said = Said::default();
        said.keep("a".into(), 1, conversation(3));
        assert_eq!(said.get("a", 1).unwrap().messages, ["xxx"]);
        assert!(said.get("a", 2).is_none() && said.get("b", 1).is_none());
    }

    #[test]
    fn an_item_is_found_for_its_own_key_only() {
        let said = Said::default();
        let [one, other] = ["m1", "m2"].map(|id| json!({"id": id, "type": "message"}));
        let conversation = Conversation {
            messages: Vec::new(),
            response: json!({"output": [one, other]}),
        };
        said.keep("a".into(), 1, conversation);
        let ids = HashSet::from(["m2", "m3"]);
        assert_eq!(said.items(&ids, 1), HashMap::from([("m2".into(), other)]));
        assert!(said.items(&ids, 2).is_empty());
    }

    #[test]
    fn the_oldest_give_way() {
        let said = Said::default();
        for id in ["a", "b", "c"] {
            said.keep(id.into(), 1, conversation(MAX_BYTES / 3));
        }
        assert!(said.get("a", 1).is_none());
        assert!(said.get("b", 1).is_some() && said.get("c", 1).is_some());
    }
}
