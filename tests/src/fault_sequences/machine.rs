//! A machine of its own: a network, disks, an agent, and a clock for that.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard};

use rustix::fs::Advice;

use super::machines::MODEL_FILE;
use crate::api_server::ApiServer;
use crate::command::run;
use crate::local_ring::smollm2;
use crate::network::Network;
use crate::node_agent::AgentMachine;
use crate::operator::NAMESPACE;
use crate::process::under;
use crate::service::Service;

/// Ends on drop, with its agent and its disks.
pub(super) struct Machine {
    agent: Mutex<Option<Service>>,
    pub(super) clock: Clock,
    /// Held by whatever happens to the model's file, and to the link's rate: one thing at a time.
    pub(super) file: Mutex<()>,
    pub(super) rate: Mutex<()>,
    /// Its disks are mounted while this runs.
    disks: Service,
    pub(super) name: String,
    as_agent: AgentMachine,
    /// Of the files of all machines; those of this one are seen below [`root`](Self::root).
    folder: PathBuf,
    logs: PathBuf,
}

/// The wall clock of those who are started with its [`variables`](Self::variables).
pub(super) struct Clock {
    library: PathBuf,
    offset: PathBuf,
    /// Held while it is wrong.
    pub(super) wrong: Mutex<()>,
}

impl Machine {
    /// With the model's file, and without an agent yet. `folder` has the folders that `machine.sh` mounts disks on.
    pub(super) fn new(
        name: &str,
        network: &Network,
        folder: &Path,
        logs: &Path,
        clock: Clock,
    ) -> Machine {
        let mut command = Command::new("sh");
        command
            .args(["-c", include_str!("machine.sh"), "machine.sh"])
            .arg(folder);
        // `ip netns exec` has a mount namespace of its own, too.
        let mut disks = Service::start(&format!("disks-{name}"), network.enter(command), logs);
        disks.wait_for_line("ready");
        let machine = Machine {
            agent: Mutex::new(None),
            clock,
            file: Mutex::default(),
            rate: Mutex::default(),
            disks,
            name: name.to_owned(),
            as_agent: AgentMachine::at(name, network.address, &folder.join("data")),
            folder: folder.to_owned(),
            logs: logs.to_owned(),
        };
        machine.put_model().expect("the model's file");
        machine
    }

    pub(super) fn start_agent(&self, api: &ApiServer) {
        let mut agent = self.agent();
        if agent.is_some() {
            return;
        }
        let mut command = self.as_agent.agent(api, NAMESPACE);
        command.envs(self.clock.variables());
        let mut enter = Command::new("nsenter");
        enter
            .arg(format!("--target={}", self.disks.id()))
            .args(["--mount", "--net", "--"]);
        let name = format!("agent-{}", self.name);
        *agent = Some(Service::start(&name, under(enter, &command), &self.logs));
    }

    /// And its members with it.
    pub(super) fn kill_agent(&self) {
        *self.agent() = None;
    }

    /// As a kubelet does. Returns whether it had ended by itself.
    pub(super) fn restart_ended_agent(&self, api: &ApiServer) -> bool {
        let ended = self.agent().take_if(Service::has_ended).is_some();
        if ended {
            self.start_agent(api);
        }
        ended
    }

    /// Its process, while there is one.
    pub(super) fn agent_process(&self) -> Option<u32> {
        self.agent().as_ref().map(Service::id)
    }

    /// The processes of its members.
    pub(super) fn members(&self) -> Vec<u32> {
        let Some(agent) = self.agent_process() else {
            return Vec::new();
        };
        let children = fs::read_to_string(format!("/proc/{agent}/task/{agent}/children"));
        // It may have ended.
        let children = children.unwrap_or_default();
        children
            .split_whitespace()
            .filter_map(|id| id.parse().ok())
            .collect()
    }

    /// Copies the model's file beside its place and moves it there, as whoever repairs it.
    pub(super) fn put_model(&self) -> io::Result<()> {
        let file = self.model();
        let copy = file.with_extension("new");
        fs::copy(smollm2(), &copy)?;
        File::open(&copy)?.sync_all()?;
        fs::rename(&copy, &file)
    }

    pub(super) fn cut_model_off(&self) -> io::Result<()> {
        OpenOptions::new()
            .write(true)
            .open(self.model())?
            .set_len(1 << 20)
    }

    /// What was not read yet cannot be read from now on.
    pub(super) fn break_disk(&self) -> io::Result<()> {
        let (disk, whole) = self.disk();
        copy(&disk, &whole)?;
        // Reads beyond the end of a loop device's file fail.
        OpenOptions::new()
            .write(true)
            .open(&disk)?
            .set_len(4 << 20)?;
        let model = File::open(self.model())?;
        Ok(rustix::fs::fadvise(&model, 0, None, Advice::DontNeed)?)
    }

    pub(super) fn mend_disk(&self) -> io::Result<()> {
        let (disk, whole) = self.disk();
        copy(&whole, &disk)?;
        fs::remove_file(whole)
    }

    /// Fills the disk of the agent's folder with a file of this name.
    pub(super) fn fill(&self, name: &str) -> io::Result<()> {
        let mut file = File::create(self.root(&self.folder.join("data").join(name)))?;
        let block = vec![1; 1 << 20];
        loop {
            match file.write(&block) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) fn free(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.root(&self.folder.join("data").join(name)))
    }

    fn agent(&self) -> MutexGuard<'_, Option<Service>> {
        self.agent.lock().unwrap()
    }

    fn model(&self) -> PathBuf {
        self.root(&self.folder.join(MODEL_FILE))
    }

    /// The disk with the models, and its copy while it is broken.
    fn disk(&self) -> (PathBuf, PathBuf) {
        let folder = self.root(&self.folder.join("image"));
        (folder.join("disk"), folder.join("whole"))
    }

    /// A path of this machine, as seen from here.
    fn root(&self, path: &Path) -> PathBuf {
        let path = path.strip_prefix("/").expect("an absolute path");
        Path::new("/proc")
            .join(self.disks.id().to_string())
            .join("root")
            .join(path)
    }
}

impl Clock {
    /// One that is right. `library` is what [`build`](Self::build) made, `offset` a file.
    pub(super) fn new(library: &Path, offset: PathBuf) -> Clock {
        let clock = Clock {
            library: library.to_owned(),
            offset,
            wrong: Mutex::default(),
        };
        clock.set(0);
        clock
    }

    /// Compiles the library of all clocks into `folder`.
    pub(super) fn build(folder: &Path) -> PathBuf {
        let library = folder.join("clock.so");
        let mut compiler = Command::new("cc");
        compiler
            .args(["-O2", "-shared", "-fPIC", "-x", "c", "-", "-o"])
            .arg(&library);
        run(compiler, include_str!("clock.c")).expect("a clock (Debian: apt-get install gcc)");
        library
    }

    pub(super) fn set(&self, seconds: i64) {
        // In one write, so that nobody reads a part of it; what the last one wrote beyond it is blank.
        let written = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&self.offset);
        let written =
            written.and_then(|mut file| file.write_all(format!("{seconds:<20}").as_bytes()));
        written.expect("a clock that can be set");
    }

    pub(super) fn variables(&self) -> [(&'static str, &str); 2] {
        [
            (
                "LD_PRELOAD",
                self.library.to_str().expect("a path in UTF-8"),
            ),
            (
                "CLOCK_OFFSET",
                self.offset.to_str().expect("a path in UTF-8"),
            ),
        ]
    }
}

/// The content of a file with holes, into another one that stays the same file.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let mut command = Command::new("cp");
    command.arg("--sparse=always").arg(from).arg(to);
    run(command, "").map(drop).map_err(io::Error::other)
}
