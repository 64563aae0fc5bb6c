//! A host of a cluster: a network, processes, mounts and cgroups of its own, made by `cluster/host.sh`. Takes root.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::command::{CommandError, run};
use crate::inputs;
use crate::process::under;

/// On drop it ends like a machine that loses power; what it had written stays.
pub(crate) struct Host {
    group: String,
    /// Lives, and with it the host, while its standard input is open.
    keeper: Child,
    /// A process in the host.
    process: u32,
}

impl Host {
    /// `group` names its cgroups, `folder` is its /var.
    pub(crate) fn start(group: &str, name: &str, folder: &Path) -> Host {
        fs::create_dir_all(folder).expect("a folder of a host");
        let mut command = Command::new("sh");
        command
            .arg(script("host.sh"))
            .args([group, name])
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Signals of the test's terminal are not for the host: it would not be able to clean up.
            .process_group(0);
        let mut keeper = command.spawn().expect("a shell");
        let mut line = String::new();
        let printed = BufReader::new(keeper.stdout.take().expect("stdout")).read_line(&mut line);
        printed.expect("what a shell printed");
        let Ok(process) = line.trim().parse() else {
            drop(keeper.stdin.take());
            let mut reason = String::new();
            let read = keeper
                .stderr
                .take()
                .expect("stderr")
                .read_to_string(&mut reason);
            read.expect("what a shell printed");
            panic!("cannot make the host {name}: {reason}");
        };
        let group = group.to_owned();
        Host {
            group,
            keeper,
            process,
        }
    }

    /// `command`, to be started on this host.
    pub(crate) fn enter(&self, command: Command) -> Command {
        let mut wrapper = Command::new("sh");
        wrapper
            .arg(script("enter.sh"))
            .arg(&self.group)
            .arg(self.process.to_string());
        under(wrapper, &command)
    }

    /// What a command prints that runs on this host.
    pub(crate) fn run(&self, line: &str) -> Result<String, CommandError> {
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().expect("a command"));
        command.args(words);
        run(self.enter(command), "")
    }

    /// Does `work` in this host's network: a socket that is made there stays there.
    pub(crate) fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        within_network(&self.network(), work)
    }

    pub(crate) fn network(&self) -> File {
        let network = File::open(format!("/proc/{}/ns/net", self.process));
        network.expect("the network of a host")
    }

    pub(crate) fn process(&self) -> u32 {
        self.process
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        // Until all of its processes are gone, and its cgroups.
        let _ = self.keeper.wait();
    }
}

/// Does `work` in a host's network, which is there for as long as the work takes, also when the host ends.
pub(crate) fn within_network<T: Send>(network: &File, work: impl FnOnce() -> T + Send) -> T {
    let enter_and_work = || {
        move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("enter a network");
        work()
    };
    // Only this thread moves, and it ends with the work.
    thread::scope(|scope| scope.spawn(enter_and_work).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn script(name: &str) -> PathBuf {
    inputs::file("tests/cluster").join(name)
}
