//! A long prompt beside an answer: how long each waits for the other.

use super::*;

const LONG: usize = 4096;

/// Microseconds until the first token of the long prompt, beside an answer or alone, and tokens of the answer meanwhile.
fn until_first_token(setting: &Setting, beside_an_answer: bool) -> (u64, usize) {
    let mut ring = TimedRing::new(setting, Drafts::Nothing);
    if beside_an_answer {
        ring.submit(ANSWERED, ring.text.clone(), setting.answer);
        ring.runs_until(PROMPT + 20);
    }
    let (begun, before) = (ring.now, ring.text.len());
    ring.submit(OTHER, vec![0; LONG], 1);
    while ring.other_came.is_none() {
        assert!(ring.step(), "nothing is under way");
    }
    let came = ring.other_came.unwrap();
    (came - begun, ring.text.len() - before)
}

/// A token in passes of its own, and the long prompt in times that it takes alone.
fn times(setting: &Setting) -> (f64, f64) {
    let (alone, _) = until_first_token(setting, false);
    let (beside, tokens) = until_first_token(setting, true);
    let [computing, _, links, _] = setting.times();
    let token = beside as f64 / tokens as f64 / (computing + links);
    let prompt = beside as f64 / alone as f64;
    println!("{token:.1} passes for a token, {prompt:.2} times as long with {setting:?}");
    (token, prompt)
}

/// Of whole chunks, a token takes 21 to 35 passes.
#[test]
fn tokens_go_on_beside_a_long_prompt() {
    for (stages, link) in [
        (&[22_600][..], 0),
        (&[50_000; 2], 500),
        (&[25_000; 4], 500),
        (&[17_000, 17_000, 50_000, 17_000], 500),
    ] {
        let setting = Setting {
            stages: stages.to_vec(),
            link,
            other: LONG,
            ..USUAL
        };
        let (token, prompt) = times(&setting);
        assert!(token < 9.5 && prompt < 1.3, "{token} {prompt} {setting:?}");
    }
}

/// Tokens have passes of their own where a row takes little.
#[test]
fn a_long_prompt_goes_on_where_rows_take_little_of_a_pass() {
    for (stages, link, row) in [(&[2000; 4][..], 25_000, 13), (&[50_000; 2], 500, 1)] {
        let setting = Setting {
            stages: stages.to_vec(),
            link,
            row,
            other: LONG,
            ..USUAL
        };
        let (token, prompt) = times(&setting);
        assert!(token < 5.0 && prompt < 1.2, "{token} {prompt} {setting:?}");
    }
}
