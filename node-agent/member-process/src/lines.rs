//! What a process writes, line by line: handed on as it comes, and the last lines kept. Signs of life are neither.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::sync::watch;

use crate::{ALIVE, JOINED};

/// What becomes of a process's lines.
pub struct Lines {
    each: Box<dyn Fn(&str) + Send + Sync>,
    last: Mutex<VecDeque<String>>,
    joined: watch::Sender<bool>,
    alive: watch::Sender<()>,
}

/// Enough for an error and what led to it.
const KEPT: usize = 20;
/// A longer line is shown in pieces, so that no process can fill our memory.
const MAX_LINE: usize = 8192;

impl Lines {
    pub fn new(each: impl Fn(&str) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            each: Box::new(each),
            last: Mutex::default(),
            joined: watch::Sender::new(false),
            alive: watch::Sender::new(()),
        })
    }

    /// Until the process closes its output.
    pub async fn follow(self: Arc<Self>, output: impl AsyncRead + Unpin) {
        let mut output = BufReader::with_capacity(MAX_LINE, output);
        let mut line = Vec::new();
        while let Ok(buffer) = output.fill_buf().await
            && !buffer.is_empty()
        {
            let end = buffer.iter().position(|&byte| byte == b'\n');
            let take = end.unwrap_or(buffer.len()).min(MAX_LINE - line.len());
            line.extend_from_slice(&buffer[..take]);
            let complete = end == Some(take);
            output.consume(take + usize::from(complete));
            if complete || line.len() == MAX_LINE {
                self.line(&line);
                line.clear();
            }
        }
        if !line.is_empty() {
            self.line(&line);
        }
    }

    /// Whether the line about joining has come.
    pub fn joined(&self) -> watch::Receiver<bool> {
        self.joined.subscribe()
    }

    /// Changes with every sign of life.
    pub fn alive(&self) -> watch::Receiver<()> {
        self.alive.subscribe()
    }

    /// Oldest first.
    pub fn last(&self) -> Vec<String> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.iter().cloned().collect()
    }

    fn line(&self, line: &[u8]) {
        let text = String::from_utf8_lossy(line).trim_end().to_owned();
        if text == ALIVE {
            self.alive.send_replace(());
            return;
        }
        if text.starts_with(JOINED) {
            self.joined.send_replace(true);
        }
        (self.each)(&text);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() == KEPT {
            last.pop_front();
        }
        last.push_back(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_handed_on_kept_and_tell_of_joining() {
        let shown = Arc::new(Mutex::new(Vec::new()));
        let each = shown.clone();
        let lines = Lines::new(move |line| each.lock().unwrap().push(line.len()));
        assert!(!*lines.joined().borrow());
        let long = "x".repeat(MAX_LINE + 10);
        let alive = lines.alive();
        let text = format!("one\n{long}\n{JOINED} as m0 (rank 0)\nlast without an end");
        lines.clone().follow(text.as_bytes()).await;
        assert!(*lines.joined().borrow());
        assert!(!alive.has_changed().unwrap());
        assert_eq!(shown.lock().unwrap()[..3], [3, MAX_LINE, 10]);
        assert_eq!(lines.last()[4], "last without an end");
        let sign = format!("{ALIVE}\n");
        lines.clone().follow(sign.as_bytes()).await;
        assert!(alive.has_changed().unwrap());
        assert_eq!(shown.lock().unwrap().len(), 5);
        let many = "again\n".repeat(KEPT);
        lines.clone().follow(many.as_bytes()).await;
        assert_eq!(lines.last(), ["again"; KEPT]);
    }
}
