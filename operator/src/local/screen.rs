//! What people see of `prima run`: a spinner on a terminal, plain lines elsewhere; the agents' log lines with the
//! member's name in front; the ring as a table. Progress and logs go to stderr, what one may want to paste or parse
//! goes to stdout.

use std::io::{self, IsTerminal, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use comfy_table::{Table, presets};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use prima_crds::v1alpha1::ring_plan::{PlannedWindow, RingPlanSpec};
use prima_halda::PlanReport;
use prima_member_process::reachable_address;
use serde_json::json;

/// A ring that serves.
pub struct Ready<'a> {
    pub plan: &'a RingPlanSpec,
    /// Bytes of weights, per member.
    pub bytes: Vec<u64>,
    /// `None`: the planner did not make it.
    pub predicted: Option<&'a PlanReport>,
    /// If it would be faster without the machines that are lent: tokens per second then.
    pub faster_alone: Option<f64>,
    pub http: SocketAddr,
    /// `None`: on another machine.
    pub pids: Vec<Option<u32>>,
    pub needs_key: bool,
}

/// Cheap to clone.
#[derive(Clone)]
pub struct Screen {
    spinner: Option<ProgressBar>,
    agents_muted: Arc<AtomicBool>,
    last_status: Arc<Mutex<String>>,
}

impl Screen {
    pub fn new() -> Self {
        let spinner = io::stderr().is_terminal().then(|| {
            let spinner = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
                spinner.set_style(style);
            }
            spinner.enable_steady_tick(Duration::from_millis(100));
            spinner
        });
        Self {
            spinner,
            agents_muted: Arc::default(),
            last_status: Arc::default(),
        }
    }

    /// What is going on. Said again only when it changed.
    pub fn status(&self, text: &str) {
        let mut last = self
            .last_status
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if *last == text {
            return;
        }
        text.clone_into(&mut last);
        match &self.spinner {
            Some(spinner) if !spinner.is_finished() => spinner.set_message(text.to_owned()),
            _ => self.line(text),
        }
    }

    /// A line that one of the agents wrote.
    pub fn agent_line(&self, member: &str, text: &str) {
        if !self.agents_muted.load(Ordering::Relaxed) {
            self.line(&format!("{member} | {text}"));
        }
    }

    /// Stops showing what agents write: when all are asked to leave, each would report the others.
    pub fn mute_agents(&self) {
        self.agents_muted.store(true, Ordering::Relaxed);
    }

    /// The ring serves: the table, the addresses, and a line to paste.
    pub fn ready(&self, ring: &Ready<'_>) {
        self.finish();
        let Ready {
            plan,
            bytes,
            predicted,
            faster_alone,
            http,
            pids,
            needs_key,
        } = ring;
        let predicted = predicted.map_or(String::new(), |report| {
            format!(
                "Predicted: {}, the first {:.1} s after a prompt of {} tokens\n",
                tokens_per_second(1e3 / report.tpot_milliseconds),
                report.ttft_milliseconds / 1e3,
                report.prompt_tokens
            )
        });
        let alone = faster_alone.map_or(String::new(), |rate| {
            format!(
                "This machine alone would be faster: {}, without --member\n",
                tokens_per_second(rate)
            )
        });
        let http = reachable_address(*http);
        let text = format!(
            "\n{} is ready: {}, {}, {}\n\n{}\n{predicted}{alone}\n\
             Chat:  http://{http}/\n\
             API:   http://{http}/v1 (as OpenAI's)\n\n\
             Try it:\n\n{}\n\n\
             Ctrl-C stops the ring.",
            plan.model.name,
            counted(plan.model.layers as usize, "layer"),
            counted(plan.members.len(), "member"),
            counted(plan.rounds as usize, "round"),
            ring_table(plan, bytes, pids),
            curl_line(&plan.model.name, http, *needs_key),
        );
        // Whoever closed our stdout does not want to know.
        let _ = writeln!(io::stdout(), "{text}");
    }

    /// Takes the spinner off the terminal.
    pub fn finish(&self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }

    fn line(&self, text: &str) {
        let write = || {
            let _ = writeln!(io::stderr(), "{text}");
        };
        match &self.spinner {
            Some(spinner) => spinner.suspend(write),
            None => write(),
        }
    }
}

fn tokens_per_second(rate: f64) -> String {
    let digits = if rate < 10.0 { 2 } else { 0 };
    format!("{rate:.digits$} tokens/s")
}

fn ring_table(plan: &RingPlanSpec, bytes: &[u64], pids: &[Option<u32>]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_BORDERS_ONLY)
        .set_header(["member", "layers", "weights", "address", "pid"]);
    for (rank, member) in plan.members.iter().enumerate() {
        let mut layers = member
            .windows
            .iter()
            .map(window_text)
            .collect::<Vec<_>>()
            .join(", ");
        if rank == 0 {
            layers = format!("embedding, {layers}, output");
        }
        table.add_row([
            member.name.clone(),
            layers,
            HumanBytes(bytes[rank]).to_string(),
            member.address.clone(),
            pids[rank].map_or("-".to_owned(), |pid| pid.to_string()),
        ]);
    }
    table
}

/// Layers as people count a range: `10-19`, one alone `4`, none `-`.
fn window_text(window: &PlannedWindow) -> String {
    match window.last - window.first {
        0 => "-".to_owned(),
        1 => window.first.to_string(),
        _ => format!("{}-{}", window.first, window.last - 1),
    }
}

fn curl_line(model: &str, http: SocketAddr, needs_key: bool) -> String {
    let body = json!({
        "model": model,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 100,
    });
    // Inside single quotes the shell leaves everything alone but the quote itself.
    let body = body.to_string().replace('\'', r"'\''");
    // The key itself stays out of scroll-back and logs.
    let key = if needs_key {
        "-H \"Authorization: Bearer $PRIMA_API_KEY\" "
    } else {
        ""
    };
    format!(
        "  curl http://{http}/v1/chat/completions -H 'Content-Type: application/json' {key}-d '{body}'"
    )
}

pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curl_line_survives_odd_model_names() {
        let http = SocketAddr::from(([127, 0, 0, 1], 8080));
        let line = curl_line("bob's \"model\"", http, true);
        assert!(line.contains(r#""model":"bob'\''s \"model\"""#), "{line}");
        assert!(line.contains("Bearer $PRIMA_API_KEY"), "{line}");
        assert!(!curl_line("m", http, false).contains("Authorization"));
    }

    #[test]
    fn shows_windows_as_people_count_layers() {
        let text = |first, last| {
            window_text(&PlannedWindow {
                first,
                last,
                gpu_layers: 0,
            })
        };
        assert_eq!(text(10, 20), "10-19");
        assert_eq!(text(4, 5), "4");
        assert_eq!(text(4, 4), "-");
    }
}
