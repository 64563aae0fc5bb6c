//! Whether packets get lost on the way to a ring's rank 0. Pure.

use std::collections::VecDeque;

/// Questions that are remembered.
const REMEMBERED: usize = 40;
/// So many of them are late by no chance. Where a fifth of all packets gets lost, each way, about ten are, and where one in a hundred does, one.
const MANY: usize = 8;

/// How the last questions fared that were answered at all.
#[derive(Default)]
pub struct Way {
    late: VecDeque<bool>,
    /// It does until none of them is late: what is known of it ends in a status, which is not to be written again and again.
    pub loses_packets: bool,
}

impl Way {
    /// One was answered, late or not. Whether that changes what is known of the way.
    pub fn note(&mut self, is_late: bool) -> bool {
        self.late.push_back(is_late);
        if self.late.len() > REMEMBERED {
            self.late.pop_front();
        }
        let late = self.late.iter().filter(|late| **late).count();
        let loses_packets = late >= MANY || (self.loses_packets && late > 0);
        let changed = loses_packets != self.loses_packets;
        self.loses_packets = loses_packets;
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_loses_packets_until_all_questions_are_in_time() {
        let mut way = Way::default();
        // Whether it loses some after as many questions, of which every so many is late; and how often that changed.
        let mut after = |questions: usize, every: usize| {
            let late = (1..=questions).map(|nth| nth.is_multiple_of(every));
            let changes = late.filter(|late| way.note(*late)).count();
            (way.loses_packets, changes)
        };
        assert_eq!(after(1000, 6), (false, 0));
        assert_eq!(after(40, 4), (true, 1));
        assert_eq!(after(1000, 10), (true, 0));
        assert_eq!(after(39, 40), (true, 0));
        assert_eq!(after(40, 41), (false, 1));
    }
}
