//! Rings of separate machines: each with its own limits of memory, processors and disk, and its own copy of the model. What the planner
//! predicts from what the machines measured of themselves, beside what the ring then takes; and what each part of reading weights
//! ahead gives. Leaves itself out where no cgroup can be made.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_tests::Endpoint;
use prima_tests::assets;
use prima_tests::http;
use prima_tests::machine::{Limits, Machine, cold_copy, drop_cached};
use prima_tests::machine_ring::{MachineRing, Node, Planned, plan};
use prima_tests::one_process::{OneProcess, end_tokens};
use tempfile::TempDir;

use crate::Effort;
use crate::client::Client;
use crate::error::BenchError;
use crate::expert_speed::WARM_UP_OF_ALL;
use prima_tests::statistics::{Samples, error_percent};

pub const LARGE: &str = "shape-8b-Q4_K_M";
const SMALL: &str = "TinyLlama-1.1B-Chat-Q4_K_M";
const HUGE: &str = "shape-70b-Q4_K_M";
const MIXTURE: &str = "shape-qwen3-30b-a3b-Q4_K_M";

/// One ring.
#[derive(Clone, Copy)]
pub struct Setting {
    pub model: &'static str,
    pub machines: &'static [Limits],
    pub rounds: usize,
    pub reading: Reading,
}

/// How weights that do not fit into memory are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// All are left to the page cache.
    PageCache,
    /// As many as fit stay; of the others, no more is read ahead than a member's smallest buffers hold.
    LeastAhead,
    /// As planned.
    Ahead,
}

/// Of one ring.
pub struct Outcome {
    pub setting: Setting,
    /// Tokens per second.
    pub predicted: Samples,
    pub measured: Samples,
    /// Megabytes that all members read for each token, and what the plan expected.
    pub read: Samples,
    pub planned_read: Samples,
    /// Of the member where it is highest: the paper's memory pressure, in percent, and megabytes of anonymous memory.
    pub pressure_percent: Samples,
    pub anonymous: Samples,
    /// Of a mixture that is read as planned.
    pub known: Known,
}

/// What is predicted once members have counted how often experts are missed, as an operator does with its next plan.
#[derive(Default)]
pub struct Known {
    /// Of the experts that tokens would lack if they chose all alike, those that they did lack, in percent.
    pub expert_misses: Samples,
    /// As of an [`Outcome`].
    pub predicted: Samples,
    pub planned_read: Samples,
}

const fn machine(megabytes: u64, cpus: f64, disk_megabytes: u64) -> Limits {
    Limits {
        memory_bytes: megabytes * 1_000_000,
        cpus: Some(cpus),
        disk_bytes_per_second: Some(disk_megabytes * 1_000_000),
    }
}

pub const TWO: &[Limits] = &[machine(2000, 2.0, 500); 2];
pub const FOUR: &[Limits] = &[machine(1000, 2.0, 250); 4];

const FOUR_WITH_4_GIB: &[Limits] = &[Limits {
    memory_bytes: 4 << 30,
    cpus: Some(2.0),
    disk_bytes_per_second: None,
}; 4];

const fn ring(model: &'static str, machines: &'static [Limits], rounds: usize) -> Setting {
    Setting {
        model,
        machines,
        rounds,
        reading: Reading::Ahead,
    }
}

const fn without(reading: Reading, machines: &'static [Limits], rounds: usize) -> Setting {
    Setting {
        reading,
        ..ring(LARGE, machines, rounds)
    }
}

const SETTINGS: [Setting; 17] = [
    ring(SMALL, &[machine(1500, 2.0, 600)], 1),
    ring(SMALL, &[machine(1500, 1.0, 600)], 1),
    ring(
        SMALL,
        &[machine(1500, 2.0, 600), machine(1500, 1.0, 600)],
        1,
    ),
    ring(SMALL, &[machine(500, 2.0, 600)], 1),
    ring(SMALL, &[machine(250, 2.0, 600); 2], 1),
    ring(LARGE, &[machine(4000, 2.0, 600)], 1),
    ring(LARGE, &[machine(2560, 2.0, 600)], 1),
    ring(LARGE, TWO, 1),
    ring(LARGE, TWO, 2),
    ring(LARGE, TWO, 4),
    ring(LARGE, FOUR, 1),
    ring(LARGE, FOUR, 2),
    ring(LARGE, FOUR, 4),
    without(Reading::LeastAhead, TWO, 4),
    without(Reading::PageCache, TWO, 4),
    without(Reading::LeastAhead, FOUR, 4),
    without(Reading::PageCache, FOUR, 4),
];
/// In percent of the experts that tokens would lack if they chose all alike: what a plan assumes of a model that never ran.
const ALIKE: u8 = 100;
const TURNS: usize = 2;
/// Of a mixture, whose disk alone decides, and has no limit: they differ more.
const MIXTURE_TURNS: usize = 3;
/// A member that takes memory back does so every five seconds.
const SETTLED: Duration = Duration::from_secs(6);
const UNSETTLED: Duration = Duration::from_secs(45);
const PROMPT: &str = "Once upon a time";
/// Tokens of a mixture between [`WARM_UP_OF_ALL`] and those that are timed, by which it is counted how many experts are missed. (A ring says
/// so itself, but only after hundreds of tokens.)
const COUNTED: usize = 64;

/// `None` where no such machines can be made.
pub fn measure(effort: &Effort) -> Result<Option<Vec<Outcome>>, BenchError> {
    let settings = match effort.turns {
        1 => &SETTINGS[..2],
        _ => &SETTINGS[..],
    };
    measure_settings(settings, effort.turns.min(TURNS))
}

/// A model of 70B in a ring of four machines with 4 GiB each, of which it would need ten.
pub fn measure_70b() -> Result<Option<Vec<Outcome>>, BenchError> {
    measure_settings(&[ring(HUGE, FOUR_WITH_4_GIB, 1)], 1)
}

/// A mixture of experts in a ring of four machines with 4 GiB each, of which it would need nearly five; also with the page cache alone.
pub fn measure_mixture() -> Result<Option<Vec<Outcome>>, BenchError> {
    let ahead = ring(MIXTURE, FOUR_WITH_4_GIB, 1);
    let page_cache = Setting {
        reading: Reading::PageCache,
        ..ahead
    };
    measure_settings(&[ahead, page_cache], MIXTURE_TURNS)
}

fn measure_settings(
    settings: &[Setting],
    turns: usize,
) -> Result<Option<Vec<Outcome>>, BenchError> {
    let any = assets::path(&format!("models/{}.gguf", settings[0].model))?;
    if let Err(error) = Machine::new("try", &FOUR[0], &any) {
        eprintln!("machines: left out, they take root and writable cgroups ({error})");
        return Ok(None);
    }
    let mut copies = Copies::default();
    let mut outcomes: Vec<Outcome> = settings.iter().map(Outcome::new).collect();
    for turn in 1..=turns {
        let mut profiles = Profiles::default();
        let mut all: Vec<&mut Outcome> = outcomes.iter_mut().collect();
        // Who begins alternates.
        if turn.is_multiple_of(2) {
            all.reverse();
        }
        for outcome in all {
            // Slow settings that only serve as a comparison are measured once.
            if turn == 1 || outcome.setting.reading == Reading::Ahead {
                eprintln!("machines, turn {turn}: {}", outcome.setting.describe());
                outcome.measure(&mut copies, &mut profiles)?;
            }
        }
    }
    Ok(Some(outcomes))
}

impl Setting {
    /// For the log.
    pub fn describe(&self) -> String {
        format!(
            "{}, {}, {} rounds, {:?}",
            self.model,
            self.describe_machines(),
            self.rounds,
            self.reading
        )
    }

    /// Such as "2 x 2000 MB, 2 CPU, 500 MB/s".
    pub fn describe_machines(&self) -> String {
        let one = |limits: &Limits| {
            format!(
                "{} MB, {} CPU{}",
                limits.memory_bytes / 1_000_000,
                limits.cpus.unwrap_or_default(),
                limits
                    .disk_bytes_per_second
                    .map_or(String::new(), |rate| format!(", {} MB/s", rate / 1_000_000))
            )
        };
        let (first, rest) = (&self.machines[0], &self.machines[1..]);
        match rest.iter().all(|other| other == first) {
            true => format!("{} x {}", self.machines.len(), one(first)),
            false => {
                let all: Vec<String> = self.machines.iter().map(one).collect();
                all.join(" + ")
            }
        }
    }

    /// Of an answer: enough of them to be measured, without waiting for minutes.
    fn tokens(&self) -> usize {
        match (self.model, self.reading) {
            (SMALL, _) => 48,
            (HUGE, _) => 4,
            (MIXTURE, _) => 32,
            (_, Reading::Ahead | Reading::LeastAhead) => 8,
            (_, Reading::PageCache) => 3,
        }
    }
}

impl Outcome {
    fn new(setting: &Setting) -> Outcome {
        Outcome {
            setting: *setting,
            predicted: Samples::default(),
            measured: Samples::default(),
            read: Samples::default(),
            planned_read: Samples::default(),
            pressure_percent: Samples::default(),
            anonymous: Samples::default(),
            known: Known::default(),
        }
    }

    /// Of the time per token, predicted against measured.
    pub fn error_percent(&self) -> f64 {
        error_percent(&self.predicted, &self.measured)
    }

    fn measure(&mut self, copies: &mut Copies, profiles: &mut Profiles) -> Result<(), BenchError> {
        let Setting {
            model,
            machines: limits,
            rounds,
            reading,
        } = self.setting;
        let file = assets::path(&format!("models/{model}.gguf"))?;
        let files = match model {
            // A disk may have no room for four of them; members read different layers of it anyway.
            HUGE | MIXTURE => vec![file.clone(); limits.len()],
            _ => copies.of(&file, limits.len())?,
        };
        let never = end_tokens(&OneProcess::open(&file, 1)?);
        if model == MIXTURE {
            read_through(&file)?;
        }
        let measured = limits
            .iter()
            .map(|limits| profiles.of(limits, &file))
            .collect::<Result<Vec<_>, _>>()?;
        let planned = |expert_misses: u8| {
            let (rounds, expert_misses) = (rounds.to_string(), expert_misses.to_string());
            let options = [
                "--context",
                "512",
                "--prompt",
                "16",
                "--answer",
                "64",
                "--rounds",
                &rounds,
                "--expert-misses",
                &expert_misses,
            ];
            plan(&file, measured.clone(), &options)
        };
        let first = planned(ALIKE);
        let machines = limits
            .iter()
            .enumerate()
            .map(|(index, limits)| Machine::new(&format!("bench{index}"), limits, &file))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|source| BenchError::Cgroup { source })?;
        let nodes: Vec<Node> = machines
            .iter()
            .zip(files)
            .map(|(machine, model)| Node { machine, model })
            .collect();
        for node in &nodes {
            drop_cached(&node.model).map_err(|source| BenchError::PageCache { source })?;
        }
        self.predicted.push(first.tokens_per_second);
        self.planned_read.push(megabytes_per_token(&first));
        let mut plan = first.plan;
        // The comparison is made by the plan: members know nothing of it.
        let options: &[&str] = match reading {
            Reading::PageCache => &["--no-streaming"],
            Reading::LeastAhead => {
                for member in &mut plan.spec.members {
                    member.read_ahead_bytes = Some(0);
                }
                &[]
            }
            Reading::Ahead => &[],
        };
        let ring = MachineRing::start(plan, &nodes, options);
        let (address, pids) = (ring.address(), ring.pids());
        let client = Client::of(ring, &never);
        let metric =
            |name| http::metric(address, name).map_err(|source| BenchError::Http { source });
        match reading {
            Reading::Ahead | Reading::LeastAhead => {
                settle(&client, || metric("prima_member_streamed_weight_bytes"))?;
            }
            // Every token is alike.
            Reading::PageCache => {}
        }
        if model == MIXTURE {
            // Fills memory with experts.
            client.seconds_per_random_token(1, WARM_UP_OF_ALL)?;
            if reading == Reading::Ahead {
                let before = ExpertUses::read(address)?;
                client.seconds_per_random_token(3, COUNTED)?;
                let misses = ExpertUses::read(address)?.misses_since(&before);
                let again = planned(misses.round() as u8);
                self.known.expert_misses.push(misses);
                self.known.predicted.push(again.tokens_per_second);
                self.known.planned_read.push(megabytes_per_token(&again));
            }
        }
        let read = || metric("prima_member_read_bytes_total");
        let before = read()?;
        let tokens = self.setting.tokens();
        let seconds = match model {
            MIXTURE => client.seconds_per_random_token(2, tokens)?,
            _ => client.seconds_per_token(PROMPT, tokens)?,
        };
        self.measured.push(1.0 / seconds);
        // The prompt is computed at once, and so read once.
        self.read.push((read()? - before) / tokens as f64 / 1e6);
        let pressure = http::metrics(address, "prima_member_memory_pressure_ratio")
            .map_err(|source| BenchError::Http { source })?;
        self.pressure_percent
            .push(100.0 * pressure.into_iter().fold(0.0, f64::max));
        let anonymous = pids.into_iter().map(anonymous_bytes).fold(0.0, f64::max);
        self.anonymous.push(anonymous / 1e6);
        Ok(())
    }
}

/// What all members are planned to read.
fn megabytes_per_token(planned: &Planned) -> f64 {
    let members = planned.plan.spec.members.iter();
    let bytes: i64 = members
        .filter_map(|member| member.read_bytes_per_token)
        .sum();
    bytes as f64 / 1e6
}

/// Reads a file through, so that it is read alike when machines are measured and when a ring runs: where this is a virtual machine, its host
/// may keep what was read before.
fn read_through(file: &Path) -> Result<(), BenchError> {
    let read = || {
        drop_cached(file)?;
        std::io::copy(&mut File::open(file)?, &mut std::io::sink())
    };
    read()
        .map(drop)
        .map_err(|source| BenchError::PageCache { source })
}

/// Of each member: how many experts its tokens needed, how many of them were missed, and the share of all for which there is no room.
struct ExpertUses {
    hits: Vec<f64>,
    misses: Vec<f64>,
    missing: Vec<f64>,
}

impl ExpertUses {
    fn read(address: SocketAddr) -> Result<ExpertUses, BenchError> {
        let of = |name| http::metrics(address, name).map_err(|source| BenchError::Http { source });
        Ok(ExpertUses {
            hits: of("prima_member_expert_hits_total")?,
            misses: of("prima_member_expert_misses_total")?,
            missing: of("prima_member_missing_experts_ratio")?,
        })
    }

    /// In percent of what would have been missed if tokens chose all experts alike: at least 1, and at most all; all, if none was.
    fn misses_since(&self, before: &ExpertUses) -> f64 {
        let since = |now: &[f64], before: &[f64]| -> Vec<f64> {
            now.iter()
                .zip(before)
                .map(|(now, before)| now - before)
                .collect()
        };
        let misses = since(&self.misses, &before.misses);
        let hits = since(&self.hits, &before.hits);
        let uses = hits.iter().zip(&misses).map(|(hits, misses)| hits + misses);
        let alike: f64 = uses
            .zip(&self.missing)
            .map(|(uses, missing)| uses * missing)
            .sum();
        match alike > 0.0 {
            true => (100.0 * misses.iter().sum::<f64>() / alike).clamp(1.0, ALIKE.into()),
            false => ALIKE.into(),
        }
    }
}

/// Lets what stays come into memory, and members find out how much that is.
fn settle(
    client: &Client,
    streamed: impl Fn() -> Result<f64, BenchError>,
) -> Result<(), BenchError> {
    let begun = Instant::now();
    let (mut before, mut since) = (f64::NAN, Instant::now());
    while since.elapsed() < SETTLED && begun.elapsed() < UNSETTLED {
        client.seconds_per_token(PROMPT, 2)?;
        let now = streamed()?;
        if now != before {
            (before, since) = (now, Instant::now());
        }
    }
    Ok(())
}

/// From the least to the most, and what people call them.
pub const READINGS: [(Reading, &str); 3] = [
    (Reading::PageCache, "page cache alone"),
    (Reading::LeastAhead, "resident set, 24 MiB ahead"),
    (Reading::Ahead, "resident set and read-ahead"),
];

/// Of one process; 0 where the system does not say.
fn anonymous_bytes(pid: u32) -> f64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let kilobytes = rollup.lines().find_map(|line| {
        let number = line.strip_prefix("Anonymous:")?.trim();
        number.strip_suffix("kB")?.trim().parse::<f64>().ok()
    });
    kilobytes.map_or(0.0, |kilobytes| kilobytes * 1024.0)
}

/// Copies of models, gone in the end.
#[derive(Default)]
struct Copies {
    folders: Vec<TempDir>,
}

impl Copies {
    /// `count` files with what is in `model`, itself the first.
    fn of(&mut self, model: &Path, count: usize) -> Result<Vec<PathBuf>, BenchError> {
        let failed = |source| BenchError::Copy {
            path: model.to_owned(),
            source,
        };
        let name = model.file_name().unwrap_or_default();
        let mut files = vec![model.to_owned()];
        for index in 0..count.saturating_sub(1) {
            if self.folders.len() <= index {
                let beside = model.parent().unwrap_or(Path::new("."));
                self.folders
                    .push(tempfile::tempdir_in(beside).map_err(failed)?);
            }
            let folder = self.folders[index].path();
            let copy = folder.join(name);
            if !copy.exists() {
                eprintln!("machines: copying {}", model.display());
                cold_copy(model, folder).map_err(failed)?;
            }
            files.push(copy);
        }
        Ok(files)
    }
}

/// What kinds of machines measured of themselves in this turn.
#[derive(Default)]
struct Profiles(Vec<(Limits, NodeProfile)>);

impl Profiles {
    fn of(&mut self, limits: &Limits, model: &Path) -> Result<NodeProfile, BenchError> {
        if let Some((_, profile)) = self.0.iter().find(|(known, _)| known == limits) {
            return Ok(profile.clone());
        }
        let machine = Machine::new("profile", limits, model)
            .map_err(|source| BenchError::Cgroup { source })?;
        let node = Node {
            machine: &machine,
            model: model.to_owned(),
        };
        let profile = node.profile();
        self.0.push((*limits, profile.clone()));
        Ok(profile)
    }
}
