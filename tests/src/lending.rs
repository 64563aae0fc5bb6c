//! Machines that are lent, and users who borrow them: each with a folder of its own for keys, as people on several machines have.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::inputs;
use crate::local_ring::LocalRingBuilder;
use crate::measurements::Measurements;
use crate::network::Network;
use crate::process::{Ended, Process, send_signal};

/// Somebody on a machine: prima's folders of that one.
pub struct User {
    folder: TempDir,
}

/// A machine that `prima agent` lends.
pub struct Lender {
    agent: Process,
    /// IP:PORT.
    pub address: String,
    /// If it takes somebody in.
    pub word: Option<String>,
    /// Where it keeps what it measured.
    measured: PathBuf,
}

/// Of machines that are lent.
fn measurements() -> Measurements {
    Measurements::of("lent")
}

impl Default for User {
    fn default() -> Self {
        Self {
            folder: tempfile::tempdir().expect("a folder"),
        }
    }
}

impl User {
    /// The variables of this user's environment.
    pub fn variables(&self) -> [(&'static str, OsString); 2] {
        [
            ("XDG_DATA_HOME", self.folder.path().join("data").into()),
            ("PRIMA_CACHE", self.cache().into()),
        ]
    }

    /// The ring, with the machine that is lent at `member`.
    pub fn borrowing(&self, ring: LocalRingBuilder, member: &str) -> LocalRingBuilder {
        let variables = self.variables().into_iter();
        let ring = variables.fold(ring, |ring, (name, value)| ring.env(name, value));
        ring.arg("--member").arg(member)
    }

    /// The file `name` among what is remembered of other machines.
    pub fn remembered(&self, name: &str) -> PathBuf {
        self.folder.path().join("data/prima").join(name)
    }

    /// Lends the machine as `name`, at `address`, in `network` if there is one. At the first time it is measured, unless another lender
    /// has measured it here.
    pub fn lend(&self, name: &str, address: &str, network: Option<&Network>) -> Lender {
        let command = self.agent(name, address);
        let command = match network {
            Some(network) => network.enter(command),
            None => command,
        };
        self.start(name, command)
    }

    /// The same, for one more borrower.
    pub fn lend_enrolling(&self, name: &str, address: &str) -> Lender {
        let mut command = self.agent(name, address);
        command.arg("--enrol");
        self.start(name, command)
    }

    fn start(&self, name: &str, command: Command) -> Lender {
        let measured = self.cache().join(format!("profiles/{name}-lent.json"));
        if !measured.exists() {
            measurements().give(&measured, &self.sent());
        }
        Lender::start(command, measured)
    }

    fn agent(&self, name: &str, address: &str) -> Command {
        let mut command = Command::new(inputs::program("prima"));
        command
            .args(["agent", "--name", name, "--listen", address])
            .envs(self.variables());
        command
    }

    /// The model files that were sent to this user's machine: how long each is, and how much of it is there.
    pub fn sent_files(&self) -> Vec<(u64, u64)> {
        let entries = fs::read_dir(self.sent()).expect("the folder of sent files");
        entries
            .map(|entry| entry.expect("an entry").path())
            .filter(|path| path.extension().is_some_and(|end| end == "gguf"))
            .map(|path| size_and_bytes_there(&path))
            .collect()
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    /// The folder of model files that were sent here.
    fn sent(&self) -> PathBuf {
        self.cache().join("sent")
    }
}

fn size_and_bytes_there(path: &Path) -> (u64, u64) {
    let metadata = path.metadata().expect("a file's metadata");
    (metadata.size(), metadata.blocks() * 512)
}

impl Lender {
    fn start(command: Command, measured: PathBuf) -> Lender {
        let mut agent = Process::spawn(command);
        agent.wait_for_output("Ctrl-C ends lending.");
        let printed = agent.stdout.lock().unwrap().clone();
        let (_, shown) = printed.split_once("--member ").expect("what to type");
        let shown = shown.lines().next().expect("an address").trim_matches('\'');
        let (address, word) = match shown.split_once('#') {
            Some((address, word)) => (address, Some(word.to_owned())),
            None => (shown, None),
        };
        Lender {
            address: address.to_owned(),
            word,
            agent,
            measured,
        }
    }

    /// What a borrower types at the first time.
    pub fn invitation(&self) -> String {
        format!("{}#{}", self.address, self.word.as_deref().expect("a word"))
    }

    /// An invitation whose word says the right key, and ends in `guess`.
    pub fn guessed(&self, guess: &str) -> String {
        let invitation = self.invitation();
        format!("{}{guess}", &invitation[..invitation.len() - guess.len()])
    }

    /// What the agent has printed so far.
    pub fn printed(&self) -> String {
        self.agent.stdout.lock().unwrap().clone()
    }

    /// What the agent and its member have logged so far.
    pub fn logged(&self) -> String {
        self.agent.errors()
    }

    /// Ends it as Ctrl-C does.
    pub fn stop(mut self) -> Ended {
        send_signal(self.agent.id(), Signal::INT);
        self.agent.wait()
    }

    /// As if its power was cut, but for the network, which tells.
    pub fn kill(mut self) {
        send_signal(self.agent.id(), Signal::KILL);
        self.agent.wait();
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        // It may have ended before it had measured.
        if !thread::panicking() && self.measured.exists() {
            measurements().keep(&self.measured);
        }
    }
}
