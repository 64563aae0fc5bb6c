//! How much other programs use the processors while this one measures. Decides nothing; where the system does not say
//! (only Linux does), it counts as nothing.

use std::fs;
use std::path::Path;

use crate::process_stat;

/// Ticks so far, of all processors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ticks {
    all: u64,
    idle: u64,
    own: u64,
}

impl Ticks {
    /// Until now.
    pub fn read(root: &Path) -> Option<Ticks> {
        let text = |path: &str| fs::read_to_string(root.join(path)).ok();
        let (all, idle) = of_machine(&text("proc/stat")?)?;
        let own = of_process(&text("proc/self/stat")?)?;
        Some(Ticks { all, idle, own })
    }

    /// Percent of all processors' time that other programs (and other virtual machines) used since `before`.
    pub fn others_percent(self, before: Ticks) -> u8 {
        let since = |now: u64, before: u64| now.saturating_sub(before);
        let all = since(self.all, before.all);
        let others = all
            .saturating_sub(since(self.idle, before.idle))
            .saturating_sub(since(self.own, before.own));
        (100 * others).checked_div(all).unwrap_or(0).min(100) as u8
    }
}

/// All and idle ticks, of the line `cpu user nice system idle iowait irq softirq steal guest guest_nice` of /proc/stat.
fn of_machine(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    // Guests are part of user and nice.
    let fields: Vec<u64> = line
        .split_whitespace()
        .take(8)
        .map_while(|field| field.parse().ok())
        .collect();
    let [_, _, _, idle, iowait, ..] = fields[..] else {
        return None;
    };
    Some((fields.iter().sum(), idle + iowait))
}

/// utime and stime, fields 14 and 15 of /proc/self/stat.
fn of_process(text: &str) -> Option<u64> {
    Some(process_stat::field(text, 14)? + process_stat::field(text, 15)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_what_neither_idles_nor_is_this_program() {
        let stat = |user: u64, idle: u64| {
            let text = format!("cpu  {user} 0 10 {idle} 5 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n");
            of_machine(&text).unwrap()
        };
        let ticks = |(all, idle), own| Ticks { all, idle, own };
        let before = ticks(stat(1000, 500), 100);
        // 1000 ticks: 300 idle, 500 our own, so 200 others'.
        let now = ticks(stat(1700, 800), 600);
        assert_eq!(now.others_percent(before), 20);
        assert_eq!(before.others_percent(before), 0);
        assert_eq!(of_machine("cpu0 1 2 3\n"), None);
    }

    #[test]
    fn a_programs_name_may_hold_anything() {
        let text = "7 (a) b 1) S 1 7 7 0 -1 4194560 1 0 0 0 33 9 0 0 20 0 1 0 100 1 1";
        assert_eq!(of_process(text), Some(42));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_tells() {
        assert!(Ticks::read(Path::new("/")).is_some());
    }
}
