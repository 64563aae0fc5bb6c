//! What next turns go on from where layers with windows cannot go back over a long answer: from all of the conversation, or from the prompt
//! before the answer, where templates leave out what was thought. It is known from the last one, also if the ring had nothing of it any more.
//! Pure.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::kept::Kind;

#[derive(Default)]
pub struct NextTurns {
    /// Of late long answers, the latest last.
    places: VecDeque<Place>,
    /// Whether the last one went on from a prompt.
    from_prompts: bool,
}

/// A place in a conversation. Its next turn begins with all that is before it, or differs from that.
struct Place {
    keyspace: u64,
    /// Tokens before it.
    before: usize,
    /// What is no longer than this is no next turn.
    told: usize,
    /// Of the last of them. No text stays here longer than on the ring.
    hash: u64,
    /// The end of a prompt. Else it is in the answer.
    prompt_ends: bool,
}

/// Two for each answer.
const MOST_PLACES: usize = 128;
/// Tokens that tell conversations apart which are as long.
const HASHED: usize = 64;
/// With its last tokens, a prompt asks for an answer. In the next one the template may have others there: Olmo's asks for thoughts, which
/// it leaves out later.
const ASKING: usize = 4;

impl NextTurns {
    /// `text` is that of a prompt of so many tokens and of a part of its long answer.
    pub fn answered(&mut self, text: &[u32], prompt: usize, keyspace: u64) {
        let asks = if prompt > 2 * ASKING { ASKING } else { 0 };
        for (told, before) in [(prompt, prompt - asks), (text.len(), text.len())] {
            self.places.push_back(Place {
                keyspace,
                before,
                told,
                hash: hash(&text[..before]),
                prompt_ends: told == prompt,
            });
        }
        while self.places.len() > MOST_PLACES {
            self.places.pop_front();
        }
    }

    /// A request came, which may be a next turn.
    pub fn submitted(&mut self, prompt: &[u32], keyspace: u64) {
        let places = self.places.iter();
        let own = places.filter(|place| place.keyspace == keyspace && place.is_in(prompt));
        // Whoever asks the same again has no next turn.
        if let Some(place) = own.max_by_key(|place| place.before)
            && place.told < prompt.len()
        {
            self.from_prompts = place.prompt_ends;
        }
    }

    /// The kept sessions that they do not go on from.
    pub fn pass_over(&self) -> Kind {
        match self.from_prompts {
            true => Kind::LongAnswer,
            false => Kind::Prompt,
        }
    }
}

impl Place {
    fn is_in(&self, text: &[u32]) -> bool {
        let before = text.get(..self.before);
        before.is_some_and(|before| hash(before) == self.hash)
    }
}

fn hash(text: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    text[text.len().saturating_sub(HASHED)..].hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A prompt of ten tokens with five of its answer.
    fn text(seed: u32) -> Vec<u32> {
        (0..15).map(|nth| 100 * seed + nth).collect()
    }

    /// What is passed over after these requests of key space 0.
    fn passed_over(prompts: &[&[u32]]) -> Kind {
        let mut turns = NextTurns::default();
        for seed in 1..=3 {
            turns.answered(&text(seed), 10, 0);
        }
        prompts.iter().for_each(|one| turns.submitted(one, 0));
        turns.pass_over()
    }

    #[test]
    fn the_last_turn_says_what_turns_go_on_from() {
        let (whole, thought) = (text(1), [&text(2)[..10], &[7]].concat());
        assert_eq!(passed_over(&[]), Kind::Prompt);
        assert_eq!(passed_over(&[&thought]), Kind::LongAnswer);
        assert_eq!(
            passed_over(&[&thought, &[&whole[..], &[7]].concat()]),
            Kind::Prompt
        );
        // The template asks for an answer in other words than those that stay.
        let asked = [&whole[..8], &[7; 3]].concat();
        assert_eq!(passed_over(&[&asked]), Kind::LongAnswer);
    }

    #[test]
    fn other_requests_say_nothing_of_turns() {
        let (first, thought) = (text(1), [&text(2)[..10], &[7]].concat());
        let (again, edited) = (&first[..10], [&first[..5], &[7; 6]].concat());
        let other = [&text(4)[..], &[7]].concat();
        assert_eq!(passed_over(&[again]), Kind::Prompt);
        assert_eq!(
            passed_over(&[&thought, again, &edited, &other]),
            Kind::LongAnswer
        );
        let mut turns = NextTurns::default();
        turns.answered(&text(2), 10, 1);
        turns.submitted(&thought, 0);
        assert_eq!(turns.pass_over(), Kind::Prompt);
    }

    /// What short prompts begin with, others do, too.
    #[test]
    fn a_short_prompt_is_known_by_all_of_it() {
        let mut turns = NextTurns::default();
        turns.answered(&text(1), 2 * ASKING, 0);
        turns.submitted(&[&text(1)[..ASKING], &[7; 10]].concat(), 0);
        assert_eq!(turns.pass_over(), Kind::Prompt);
    }

    #[test]
    fn the_latest_prompt_of_a_conversation_counts() {
        let mut turns = NextTurns::default();
        // A turn that went on from all, and one that does not.
        let second = [&text(1)[..], &text(2)].concat();
        turns.answered(&text(1), 10, 0);
        turns.answered(&second, 25, 0);
        turns.submitted(&[&second[..25], &[7]].concat(), 0);
        assert_eq!(turns.pass_over(), Kind::LongAnswer);
    }

    #[test]
    fn only_late_answers_are_remembered() {
        let mut turns = NextTurns::default();
        for seed in 1..=1000 {
            turns.answered(&text(seed), 10, 0);
        }
        assert_eq!(turns.places.len(), MOST_PLACES);
    }
}
