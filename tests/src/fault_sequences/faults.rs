//! How each fault of machines that are networks is brought about, and lifted; and what the faults of nodes have in common with them.

use std::ops::Range;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use super::machine::Clock;
use super::machines::Machines;
use super::sequence::{Fault, Kind};
use super::stage::Roles;
use crate::command::run;
use crate::network::UPLINK;
use crate::wait_until;

/// Of every second, how long a link with bursts is gone.
const BURST: Duration = Duration::from_millis(300);
const SECOND: Duration = Duration::from_secs(1);
/// Every fifth packet, to iptables.
pub(super) const FIFTH: &str = "-m statistic --mode random --probability 0.2";
/// Of a slow link, to tc.
pub(super) const SLOW: &str = "200kbit";
/// Clocks go wrong by minutes, hours and days, either way.
const CLOCK_STEPS: [i64; 3] = [-600, 3 * 3600, -40 * 86400];

impl Machines<'_> {
    pub(super) fn break_machine(&self, fault: &Fault, roles: &Roles, end: Instant) {
        let names = self.machines.iter().map(|machine| machine.name.as_str());
        let order = roles.order(names);
        let (index, next) = (order[fault.victim], order[(fault.victim + 1) % order.len()]);
        let machine = &self.machines[index];
        let address = self.networks[index].address.to_string();
        match fault.kind {
            Kind::KillMember => signal(&machine.members(), Signal::KILL),
            Kind::StopMember => pause(&machine.members(), end),
            Kind::StopAgent => pause(machine.agent_process().as_slice(), end),
            Kind::KillAgent => {
                machine.kill_agent();
                sleep_until(end);
                machine.start_agent(&self.api);
            }
            Kind::Cut | Kind::CutOneWay => {
                self.cut([index, next], fault.cut_ways(), || sleep_until(end));
            }
            Kind::Isolate => dropping(&[["-s", &address], ["-d", &address]], || sleep_until(end)),
            Kind::Burst => in_bursts(end, |burst| {
                dropping(&[["-s", &address], ["-d", &address]], burst);
            }),
            Kind::Lose => {
                let fifth: Vec<&str> = FIFTH.split(' ').collect();
                let lost = ["-s", "-d"].map(|side| [&[side, &address], &fifth[..]].concat());
                dropping(&lost, || sleep_until(end));
            }
            Kind::Slow => self.slow_down(index, end),
            Kind::Truncate => {
                let _one_at_a_time = machine.file.lock().unwrap();
                machine.cut_model_off().expect("a shorter file");
                sleep_until(end);
                machine.put_model().expect("the whole file");
            }
            Kind::Unreadable => {
                let _one_at_a_time = machine.file.lock().unwrap();
                // What is mapped stays in memory.
                let members = machine.members();
                signal(&members, Signal::KILL);
                wait_until("nothing is mapped", || {
                    let mut maps = members
                        .iter()
                        .map(|id| fs::read(format!("/proc/{id}/maps")));
                    maps.all(|map| map.unwrap_or_default().is_empty())
                });
                machine.break_disk().expect("a broken disk");
                sleep_until(end);
                machine.mend_disk().expect("a mended disk");
            }
            Kind::FullDisk => {
                let name = format!("filled-{}", fault.at.as_millis());
                machine.fill(&name).expect("a full disk");
                sleep_until(end);
                machine.free(&name).expect("room on a disk");
            }
            Kind::AgentClock => step(&machine.clock, fault, end),
            Kind::KillOperator
            | Kind::StopOperator
            | Kind::OperatorClock
            | Kind::KillNode
            | Kind::DeleteAgent
            | Kind::DeleteOperator
            | Kind::RestartApiServer => unreachable!("no fault of these machines"),
        }
    }

    pub(super) fn break_operator(&self, fault: &Fault, roles: &Roles, end: Instant) {
        let mut slots = self.operators.iter();
        let leader = slots.position(|slot| slot.identity == roles.leader);
        let leader = leader.unwrap_or(0);
        let index = if fault.victim == 0 {
            leader
        } else {
            1 - leader
        };
        let slot = &self.operators[index];
        match fault.kind {
            Kind::KillOperator => {
                slot.kill();
                sleep_until(end);
                slot.start(&self.api);
            }
            Kind::StopOperator => pause(slot.process().as_slice(), end),
            _ => step(&slot.clock, fault, end),
        }
    }

    /// While `meanwhile` runs, no packet goes these ways between two machines: from the one to the other is 0, back is 1.
    pub(super) fn cut<T>(
        &self,
        pair: [usize; 2],
        ways: Range<usize>,
        meanwhile: impl FnOnce() -> T,
    ) -> T {
        let [one, other] = pair.map(|index| self.networks[index].address.to_string());
        let lost = [["-s", &one, "-d", &other], ["-s", &other, "-d", &one]];
        dropping(&lost[ways], meanwhile)
    }

    /// Both ways, with a queue that holds what comes in a second.
    fn slow_down(&self, index: usize, end: Instant) {
        let _one_at_a_time = self.machines[index].rate.lock().unwrap();
        let network = &self.networks[index];
        let port = network.port();
        let limit = |change: &str| {
            let mut words = Vec::from(["qdisc", change, "dev"]);
            let rate = ["root", "tbf", "rate", SLOW, "burst", "8k", "latency", "1s"];
            for (device, inside) in [(port.as_str(), false), (UPLINK, true)] {
                words.truncate(3);
                words.push(device);
                words.extend(if change == "add" {
                    &rate[..]
                } else {
                    &rate[..1]
                });
                let mut command = Command::new("tc");
                command.args(&words);
                let command = if inside {
                    network.enter(command)
                } else {
                    command
                };
                run(command, "").expect("another rate of a link");
            }
        };
        limit("add");
        sleep_until(end);
        limit("del");
    }
}

/// While `meanwhile` runs, packets that match one of these are dropped where they come in, and where they are made.
fn dropping<T, R: AsRef<[W]>, W: AsRef<str>>(rules: &[R], meanwhile: impl FnOnce() -> T) -> T {
    let change = |change: &str| {
        for chain in ["PREROUTING", "OUTPUT"] {
            for rule in rules {
                let mut command = Command::new("iptables");
                command.args(["-w", "-t", "raw", change, chain]);
                command.args(rule.as_ref().iter().map(AsRef::as_ref));
                command.args(["-j", "DROP"]);
                run(command, "").expect("a rule for packets");
            }
        }
    };
    change("-A");
    let done = meanwhile();
    change("-D");
    done
}

/// For a while of every second. `lose` has packets lost while it does what it is given.
pub(super) fn in_bursts(end: Instant, lose: impl Fn(fn())) {
    while Instant::now() < end {
        lose(|| thread::sleep(BURST));
        thread::sleep(SECOND - BURST);
    }
}

pub(super) fn pause(processes: &[u32], end: Instant) {
    signal(processes, Signal::STOP);
    sleep_until(end);
    signal(processes, Signal::CONT);
}

/// To those that are still there.
pub(super) fn signal(processes: &[u32], signal: Signal) {
    for process in processes {
        let process = Pid::from_raw(*process as i32).expect("a process id");
        match kill_process(process, signal) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => panic!("{signal:?}: {}", io::Error::from(error)),
        }
    }
}

fn step(clock: &Clock, fault: &Fault, end: Instant) {
    let _one_at_a_time = clock.wrong.lock().unwrap();
    clock.set(CLOCK_STEPS[fault.at.as_millis() as usize / 100 % CLOCK_STEPS.len()]);
    sleep_until(end);
    clock.set(0);
}

pub(super) fn sleep_until(time: Instant) {
    thread::sleep(time.saturating_duration_since(Instant::now()));
}
