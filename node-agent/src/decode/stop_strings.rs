//! Ends a text before the first stop string, even if the text comes in pieces. Pure. Holds back only what could still
//! become a stop string.

/// The stop strings of one choice, and the text held back.
#[derive(Debug)]
pub struct StopStrings {
    /// With their places among those asked for.
    stops: Vec<(usize, String)>,
    held: String,
}

impl StopStrings {
    /// Empty strings stop nothing.
    pub fn new(stops: &[String]) -> Self {
        Self {
            stops: stops
                .iter()
                .cloned()
                .enumerate()
                .filter(|(_, stop)| !stop.is_empty())
                .collect(),
            held: String::new(),
        }
    }

    /// Takes the next piece. Returns the text that is certain to come before any stop string, and which stop string is complete, which
    /// ends the text.
    pub fn push(&mut self, text: &str) -> (String, Option<usize>) {
        self.held.push_str(text);
        let found = self
            .stops
            .iter()
            .filter_map(|(place, stop)| Some((self.held.find(stop)?, *place)));
        if let Some((start, place)) = found.min() {
            self.held.truncate(start);
            return (std::mem::take(&mut self.held), Some(place));
        }
        let certain = self.held.len() - self.possible_beginning();
        let rest = self.held.split_off(certain);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// The text ends here: what was held back is no stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes at the end of the text that could begin a stop string.
    fn possible_beginning(&self) -> usize {
        let stops: Vec<&String> = self.stops.iter().map(|(_, stop)| stop).collect();
        prima_text::unfinished(&self.held, &stops)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stops(stops: &[&str]) -> StopStrings {
        StopStrings::new(
            &stops
                .iter()
                .map(|stop| (*stop).to_owned())
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn a_stop_string_across_pieces_never_shows() {
        let mut stops = stops(&["\n\nUser:"]);
        assert_eq!(stops.push("Hi.\n"), ("Hi.".into(), None));
        assert_eq!(stops.push("\nUs"), (String::new(), None));
        assert_eq!(stops.push("er: more"), (String::new(), Some(0)));
    }

    #[test]
    fn what_turned_out_to_be_no_stop_string_is_text_after_all() {
        let mut stops = stops(&["END", "é!"]);
        assert_eq!(stops.push("EN"), (String::new(), None));
        assert_eq!(stops.push("TER é"), ("ENTER ".into(), None));
        assert_eq!(stops.finish(), "é");
        assert_eq!(stops.push("a"), ("a".into(), None));
    }

    #[test]
    fn without_stop_strings_nothing_is_held() {
        let mut stops = stops(&[""]);
        assert_eq!(stops.push("anything"), ("anything".into(), None));
        assert_eq!(stops.finish(), "");
    }

    proptest! {
        /// Character by character, the answer is the text before the stop string that is complete first.
        #[test]
        fn ends_before_what_is_complete_first(text in "[abé]{0,24}", stop in prop::collection::vec("[abé]{1,4}", 0..3)) {
            let expected = text
                .char_indices()
                .map(|(start, character)| start + character.len_utf8())
                .find_map(|end| {
                    let stop = stop.iter().filter(|stop| text[..end].ends_with(stop.as_str())).max_by_key(|stop| stop.len())?;
                    Some(&text[..end - stop.len()])
                });
            let mut stops = StopStrings::new(&stop);
            let (mut answer, mut stopped) = (String::new(), false);
            for character in text.chars() {
                let (certain, complete) = stops.push(&character.to_string());
                answer.push_str(&certain);
                if complete.is_some() {
                    stopped = true;
                    break;
                }
            }
            if !stopped {
                answer.push_str(&stops.finish());
            }
            prop_assert_eq!(answer, expected.unwrap_or(&text));
            prop_assert_eq!(stopped, expected.is_some());
        }

        /// With larger pieces no stop string shows either, and nothing is lost before it.
        #[test]
        fn no_stop_string_ever_shows(text in "[ab]{0,24}", stop in "[ab]{1,4}", cuts in prop::collection::vec(1usize..4, 24)) {
            let mut stops = StopStrings::new(std::slice::from_ref(&stop));
            let (mut answer, mut rest, mut stopped) = (String::new(), text.as_str(), false);
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                rest = after;
                let (certain, complete) = stops.push(piece);
                answer.push_str(&certain);
                if complete.is_some() {
                    stopped = true;
                    break;
                }
            }
            if !stopped {
                answer.push_str(&stops.finish());
            }
            prop_assert_eq!(answer.as_str(), text.split(stop.as_str()).next().unwrap_or(""));
        }
    }
}
