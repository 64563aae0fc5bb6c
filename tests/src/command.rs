//! Commands that run to their end: what they print, or an error that tells the command and what it wrote on stderr.

use std::io::{self, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;

#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("cannot run {command}")]
    Run {
        command: String,
        #[source]
        source: io::Error,
    },
    #[error("{command}: {status}\n{stderr}")]
    Failed {
        command: String,
        status: ExitStatus,
        stderr: String,
    },
}

/// What `command` prints, given `input`.
///
/// # Errors
/// Where it cannot be started, or ends with a status other than 0.
pub(crate) fn run(mut command: Command, input: &str) -> Result<String, CommandError> {
    let line = line_of(&command);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let ended = command.spawn().and_then(|mut child| {
        let mut stdin = child.stdin.take().expect("stdin");
        thread::scope(|scope| {
            // Writes while its output is read, so that neither waits for the other. A command that ignores its input is no error.
            scope.spawn(move || stdin.write_all(input.as_bytes()));
            child.wait_with_output()
        })
    });
    let output = match ended {
        Ok(output) => output,
        Err(source) => {
            return Err(CommandError::Run {
                command: line,
                source,
            });
        }
    };
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(CommandError::Failed {
            command: line,
            status: output.status,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }),
    }
}

fn line_of(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}
