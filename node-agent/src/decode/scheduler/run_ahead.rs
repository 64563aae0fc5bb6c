//! Drafts behind drafts: more of what is guessed goes out while earlier guesses are still on the ring, so that members compute that would
//! wait, and a draft model guesses while a pass is under way. Frames of one sequence follow one another like chunks of a prompt. What comes
//! home right needs no further pass; with the first wrong token all frames behind it are nobody's, and the next frame begins in their place.
//!
//! A frame that is right brings its tokens about a trip sooner. One that is wrong may hold up the frame that takes its place by what the slowest
//! machine computes of it. So it goes out while odds x trip > (1 - odds) x slowest machine. It takes the time of members only that have nothing
//! else to do: as many frames are under way as the slowest machine can compute in a trip, and no chunk of a prompt among them.

use std::time::{Duration, Instant};

use super::speculation::LONGEST_DRAFT;
use super::{Flight, Scheduler, Sequence, SequenceId, State};
use crate::ring::Output;

/// What passes took lately, the latest counting an eighth.
#[derive(Default)]
pub struct PassTimes {
    trip: f64,
    slowest: f64,
}

/// The most guesses in a frame that runs ahead, if they are the model's or beside others' frames. Wider ones hold a member up for longer than the
/// next is worth waiting for.
const ROWS_AHEAD: usize = 8;
/// If a larger share of the model's guesses is right, they go in the widest frames: there is hardly a wrong one that could be known sooner.
const NEARLY_ALL: f64 = 0.98;
/// No larger share of guesses from the text is believed to be right: it is known from the last ten or so.
const BELIEVED: f64 = 0.99;
/// Fewer passes than this do not overlap enough to gain anything.
const LEAST_PASSES: f64 = 2.0;

impl PassTimes {
    /// The slowest machine computed a pass for so long: longer where it is at other things, too.
    pub fn add(&mut self, slowest: Duration) {
        fade(&mut self.slowest, slowest);
    }

    /// A pass that was alone on the ring was on its way for so long. Of others it is not known how much they waited: a member that computes does
    /// not hear what arrives.
    pub fn add_trip(&mut self, trip: Duration) {
        fade(&mut self.trip, trip);
    }

    /// Passes that can be under way without waiting for one another; not a number before any were.
    fn passes(&self) -> f64 {
        self.trip / self.slowest
    }
}

fn fade(mean: &mut f64, latest: Duration) {
    let latest = latest.as_secs_f64();
    *mean = match *mean {
        0.0 => latest,
        before => before + (latest - before) / 8.0,
    };
}

impl Scheduler {
    /// The least odds for which a frame runs ahead now; `None`: none does.
    pub(super) fn odds_to_run_ahead(&self) -> Option<f64> {
        let passes = self.pass_times.passes();
        let flights = self.flights.values().flatten();
        let under_way = flights.filter(|one| one.brings.is_some()).count() as f64;
        let idle = self.chunks_in_flight() == 0 && under_way < passes.floor();
        (self.limits.options.run_ahead && passes >= LEAST_PASSES && idle)
            .then(|| 1.0 / (1.0 + passes))
    }

    /// Sends what follows the draft of a sequence by the place in the text that it came from.
    pub(super) fn run_ahead(&mut self, id: SequenceId, now: Instant) {
        while let Some(least) = self.odds_to_run_ahead() {
            let Some(sequence) = self.sequence(id) else {
                return;
            };
            let right = sequence.speculation.text_is_right().min(BELIEVED);
            // Others' tokens wait behind wide frames.
            let widest = match self.running.len() {
                1 => LONGEST_DRAFT,
                _ => ROWS_AHEAD,
            };
            // Looking something up takes no time.
            let rows = self.best_rows(right, 0.0, widest);
            let limit = self.draft_limit(id).min(rows);
            let Some(Sequence {
                text, speculation, ..
            }) = self.sequence(id)
            else {
                return;
            };
            let more = speculation.look_on(text, limit, least);
            if more.is_empty() {
                return;
            }
            self.send_ahead(id, more, now);
        }
    }

    /// How many guesses a sequence's last token is to wait for, if the draft model goes on guessing while it is under way: as many as a frame
    /// should have, and no longer than the slowest machine would take for a frame of their own. `None` if the model does not go on.
    pub(super) fn guesses_to_wait_for(&self, id: SequenceId) -> Option<usize> {
        let least = self.odds_to_run_ahead()?;
        let sequence = &self.requests.get(&id.0)?.sequences[id.1];
        let goes_on = sequence.speculation.model_goes_on(1, least) > 0;
        let while_one_computes = (self.pass_times.slowest / self.guess_seconds) as usize;
        let right = sequence.speculation.model_is_right();
        goes_on.then(|| while_one_computes.min(self.best_rows_of_model(right, LONGEST_DRAFT)))
    }

    /// How many rows frames of the model's guesses should have, at most `limit`, if a share of these is `right`.
    fn best_rows_of_model(&self, right: f64, limit: usize) -> usize {
        match right > NEARLY_ALL {
            true => limit,
            false => self.best_rows(right, self.guess_seconds, limit),
        }
    }

    /// How many rows frames of guesses should have, at most `limit`, if a share of these is `right`, and one takes so many seconds to guess. With
    /// wide frames fewer bring as much, with narrow ones all is sooner known. Up to the first wrong token it takes a trip, and for each frame
    /// what the slowest machine, or whoever guesses, does for one. The last of them is what holds up the next trip.
    fn best_rows(&self, right: f64, guess_seconds: f64, limit: usize) -> usize {
        let narrow = self.cost.of(1).as_secs_f64();
        let takes = |rows: usize| {
            let trip = self.cost.of(rows).as_secs_f64();
            let computing = self.pass_times.slowest * trip / narrow;
            let interval = computing.max(rows as f64 * guess_seconds);
            let frames = 1.0 / (1.0 - right.powi(rows as i32));
            trip + frames * interval
        };
        let all = (1..=limit).map(|rows| (takes(rows), rows));
        all.min_by(|(one, _), (other, _)| one.total_cmp(other))
            .map_or(1, |(_, rows)| rows)
    }

    /// Has the draft model guess what follows the drafts on the ring, of the sequence where most of it may be right.
    pub(super) fn guess_ahead(&mut self, now: Instant) {
        let Some(least) = self.odds_to_run_ahead() else {
            return;
        };
        // A frame as often as the slowest machine can take one.
        let rows = (self.pass_times.slowest / self.guess_seconds).ceil() as usize;
        let likely = |id: SequenceId| {
            let sequence = &self.requests.get(&id.0)?.sequences[id.1];
            let right = sequence.speculation.model_is_right();
            let rows = rows.clamp(1, self.best_rows_of_model(right, ROWS_AHEAD));
            let limit = rows.min(self.draft_limit(id));
            let under_way = sequence.is_under_way();
            under_way.then(|| (sequence.speculation.model_goes_on(limit, least), id))
        };
        let running = self.running.values();
        let Some((count @ 1.., id)) = running.filter_map(|&id| likely(id)).max() else {
            return;
        };
        if let Some(text) = self.sequence(id).map(|one| one.on_ring()) {
            self.ask_model(id, text, count, false, now);
        }
    }

    /// The draft model said how a text goes on that it was asked for. If that is how this one still goes, the rest runs ahead.
    pub(super) fn guessed_ahead(
        &mut self,
        id: SequenceId,
        text: &[u32],
        guess: &[u32],
        now: Instant,
    ) {
        if self.odds_to_run_ahead().is_none() {
            return;
        }
        let limit = self.draft_limit(id);
        let Some(sequence) = self.sequence(id).filter(|one| one.is_under_way()) else {
            return;
        };
        let said = [text, guess].concat();
        let Some(rest) = said.strip_prefix(sequence.on_ring().as_slice()) else {
            return;
        };
        let more = &rest[..rest.len().min(limit)];
        sequence.speculation.take_guess(more);
        if !more.is_empty() {
            self.send_ahead(id, more.to_vec(), now);
        }
    }

    /// Sends the end of a sequence's draft.
    fn send_ahead(&mut self, id: SequenceId, tokens: Vec<u32>, now: Instant) {
        let Some(&mut Sequence {
            ref text,
            ref speculation,
            state: State::Running { session, .. },
        }) = self.sequence(id)
        else {
            return;
        };
        let first = text.len() + speculation.drafted().len() - tokens.len();
        let flight = Flight {
            awaited: self.awaited(self.expected(tokens.len(), false), now),
            chunk: false,
            brings: Some(id),
            alone: false,
            rows: tokens.len(),
            tells_cost: false,
        };
        let wanted = tokens.len();
        self.send_tokens(session, first, tokens, (wanted, Output::Logits), flight);
    }
}

impl Sequence {
    /// Its text and its draft.
    pub(super) fn on_ring(&self) -> Vec<u32> {
        let mut tokens = self.text.clone();
        tokens.extend(self.speculation.drafted());
        tokens
    }

    /// All of its text is on the ring.
    fn is_under_way(&self) -> bool {
        matches!(self.state, State::Running { sent, .. } if sent == self.text.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_pass_counts_an_eighth() {
        let seconds = Duration::from_secs;
        let mut times = PassTimes::default();
        assert!(times.passes().is_nan());
        times.add(seconds(1));
        times.add_trip(seconds(8));
        assert_eq!(times.passes(), 8.0);
        // 9 s.
        times.add_trip(seconds(16));
        assert_eq!(times.passes(), 9.0);
        // 2 s.
        times.add(seconds(9));
        assert_eq!(times.passes(), 4.5);
    }
}
