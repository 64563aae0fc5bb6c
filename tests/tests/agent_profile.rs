//! `prima-node-agent profile` as a user runs it: the real program measures the machine that the tests run on. What it finds cannot be known
//! here, only that it is complete, plausible, affordable and kept.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use prima_crds::v1alpha1::node_profile::{NodeProfile, NodeProfileStatus};
use prima_crds::v1alpha1::ring_plan::RingPlan;
use prima_engine::Compute;
use prima_tests::free_ports::free_address;
use prima_tests::local_ring::{LocalRing, smollm2};
use prima_tests::process::peak_memory;
use prima_tests::stopwatch::{Stopwatch, without_waits};
use prima_tests::{Endpoint as _, inputs};
use tempfile::TempDir;

/// Every weight format that the engine runs.
const FORMATS: [&str; 23] = [
    "BF16", "F16", "F32", "IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS",
    "IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K",
    "Q6_K", "Q8_0",
];

/// Between two looks at how long an agent has waited for a processor.
const WAITS_LOOK: Duration = Duration::from_millis(500);

#[test]
fn a_machine_is_measured_whole_and_within_bounds() {
    let machine = Machine::new();
    let ended = machine.profile(&["-o", "yaml", "--name", "desk"]);
    // Bounds on what it costs, far above what it takes on an idle machine: it must be safe to run anywhere.
    assert!(ended.took < Duration::from_secs(60), "{ended:?}");
    assert!(
        (1 << 20..1 << 30).contains(&ended.peak_bytes),
        "{} bytes at the peak",
        ended.peak_bytes
    );
    let status = ended.status("desk");

    let mut formats: Vec<&str> = status
        .cpu
        .throughput
        .iter()
        .map(|t| t.format.as_str())
        .collect();
    formats.sort_unstable();
    assert_eq!(formats, FORMATS);
    let computed = Compute::model_parts().map(|part| part.name());
    assert_eq!(status.parts, computed.collect::<Vec<_>>());
    assert!(status.architectures.iter().any(|name| name == "llama"));
    samples_run_what(&status);
    // What a machine of this century may have that is busy with other tests: with a wrong unit, a figure is off by a thousand.
    for one in &status.cpu.throughput {
        within(&one.format, one.decode_bytes_per_second, 10 << 20, 1 << 40);
        within(
            &one.format,
            one.prefill_flop_per_second,
            50_000_000,
            1_500_000_000_000 * i64::from(status.cpu.threads),
        );
    }
    let (cpu, memory, disk) = (&status.cpu, &status.memory, &status.disk);
    within(
        "layer overhead",
        cpu.layer_overhead_nanoseconds,
        100,
        10_000_000,
    );
    within("memory", memory.read_bytes_per_second, 200 << 20, 4 << 40);
    within("KV", memory.kv_append_bytes_per_second, 20 << 20, 4 << 40);
    within(
        "disk",
        disk.sequential_read_bytes_per_second,
        1 << 20,
        100 << 30,
    );
    within(
        "random reads",
        disk.random_read_bytes_per_second,
        50 << 10,
        20 << 30,
    );
    within(
        "experts",
        disk.expert_read_bytes_per_second.unwrap(),
        1 << 20,
        100 << 30,
    );
    let [loopback] = &status.links[..] else {
        panic!("{:?}", status.links);
    };
    assert_eq!(loopback.to, "loopback");
    within("a hop", loopback.latency_nanoseconds, 1_000, 20_000_000);
    within("a link", loopback.bytes_per_second, 10 << 20, 1 << 40);

    // What other sources can also tell.
    let processors = thread::available_parallelism().unwrap().get() as i32;
    assert!((1..=processors).contains(&cpu.threads), "{cpu:?}");
    assert!(!cpu.model.is_empty(), "{cpu:?}");
    if cfg!(target_arch = "x86_64") {
        let known = fs::read_to_string("/proc/cpuinfo").unwrap();
        assert!(known.contains(&cpu.model), "{cpu:?}");
    }
    // A container may have less than the machine.
    let known = fs::read_to_string("/proc/meminfo").unwrap();
    let kilobytes = known.split_whitespace().nth(1).unwrap();
    let total = kilobytes.parse::<i64>().unwrap() * 1024;
    within("memory", memory.total_bytes, 64 << 20, total);
    within(
        "memory left",
        memory.available_bytes,
        1 << 20,
        memory.total_bytes,
    );
    let known = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(status.system.kernel, known.trim());
    let known = fs::read_to_string("/etc/os-release").unwrap();
    let name = &status.system.os_name;
    assert!(!name.is_empty() && known.contains(name), "{name}: {known}");

    let left: Vec<_> = fs::read_dir(machine.models()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

/// People plan with them for what this version runs.
fn samples_run_what(status: &NodeProfileStatus) {
    for name in ["four-office-pcs", "gaming-pc-and-laptop", "pc-and-two-pis"] {
        let file = inputs::file(&format!("operator/samples/machines/{name}.yaml"));
        let yaml = fs::read_to_string(file).unwrap();
        for sample in NodeProfile::all_from_yaml(name, &yaml).unwrap() {
            let sample = sample.status.unwrap();
            let families = |status: &NodeProfileStatus| -> BTreeSet<String> {
                status.architectures.iter().cloned().collect()
            };
            assert_eq!(families(&sample), families(status), "{name}");
            assert_eq!(sample.parts, status.parts, "{name}");
            let reads = |status: &NodeProfileStatus| {
                [
                    status.reads_windowed_sequences,
                    status.reads_gpus,
                    status.reads_chunk_positions,
                ]
            };
            assert_eq!(reads(&sample), reads(status), "{name}");
        }
    }
}

#[test]
fn what_was_measured_is_kept_until_something_changes() {
    let machine = Machine::new();
    let arguments = ["-o", "json", "--name", "desk"];
    let first = machine.profile(&arguments);
    assert!(first.stderr.contains("measuring the disk"), "{first:?}");
    let again = machine.profile(&arguments);
    assert!(!again.stderr.contains("measuring"), "{again:?}");
    let (first, again) = (first.status("desk"), again.status("desk"));
    let but_for_memory = |mut status: NodeProfileStatus| {
        status.memory.available_bytes = 0;
        status.memory.swappable_bytes = 0;
        status
    };
    assert_eq!(but_for_memory(again), but_for_memory(first.clone()));

    let other = machine.profile(&[&arguments[..], &["--threads", "1"]].concat());
    for part in ["measuring the disk", "threads"] {
        assert!(other.stderr.contains(part), "{other:?}");
    }
    let asked = machine.profile(&[&arguments[..], &["--threads", "1", "--fresh"]].concat());
    assert!(asked.stderr.contains("measuring the disk"), "{asked:?}");
    // Another machine's name is another profile.
    let other = machine.profile(&["--name", "desk-2", "--threads", "1"]);
    assert!(
        other.stderr.contains("nothing was measured yet"),
        "{other:?}"
    );
    assert!(
        other.stdout.starts_with("desk-2: ") && other.stdout.contains("GFLOP/s"),
        "{other:?}"
    );
}

#[test]
fn the_way_to_a_member_of_a_ring_is_measured_while_it_serves() {
    let machine = Machine::new();
    let ring = LocalRing::builder().model(&smollm2()).members(2).start();
    let address = address_of_member(&ring, 1);
    let link = format!("laptop={address}");
    let status = machine
        .profile(&["-o", "yaml", "--name", "desk", "--link", &link])
        .status("desk");
    assert_eq!(status.links.len(), 1);
    assert_eq!(status.links[0].to, "laptop");
    within(
        "a hop",
        status.links[0].latency_nanoseconds,
        1_000,
        50_000_000,
    );
    within(
        "a link",
        status.links[0].bytes_per_second,
        10 << 20,
        1 << 40,
    );
    // The ring still works.
    assert!(
        ring.complete("The capital of France is", 8)
            .contains("Paris")
    );
    ring.stop();

    // Not the member's address: by now somebody else may have its port.
    let address = free_address().to_string();
    let link = format!("laptop={address}");
    let error = machine.refused(&["--name", "desk", "--link", &link]);
    assert!(
        error.contains("laptop") && error.contains(&address),
        "{error}"
    );
}

#[test]
fn what_cannot_be_measured_is_named_with_what_to_do() {
    let machine = Machine::new();
    // Nobody can make a file there, not even root.
    for (arguments, expected) in [
        (
            &["--models", "/proc"][..],
            &["/proc", "make the folder writable", "--models"][..],
        ),
        (
            &["--models", "no/such/folder"],
            &["no/such/folder", "--models"],
        ),
        (&["--name", "My PC"], &["--name", "My PC", "lower-case"]),
        (&["--link", "laptop"], &["--link", "NAME=HOST:PORT"]),
        (&["--threads", "0"], &["--threads", "1..=1024"]),
    ] {
        let error = machine.refused(arguments);
        for part in expected {
            assert!(error.contains(part), "no {part:?} in {error}");
        }
    }
}

/// Checks that a machine can have this figure.
fn within(what: &str, figure: i64, least: i64, most: i64) {
    assert!((least..=most).contains(&figure), "{what}: {figure}");
}

/// A cache and a models' folder of a test's own, on the disk on which the tests are built: `/tmp` may be in memory.
struct Machine(TempDir);

/// How the agent ended and what it had written.
#[derive(Debug)]
struct Ended {
    success: bool,
    stdout: String,
    stderr: String,
    /// Most memory that was resident, by the kernel.
    peak_bytes: u64,
    /// By a clock that stands while the agent waits for a processor.
    took: Duration,
}

impl Machine {
    fn new() -> Machine {
        let folder = inputs::program("prima-node-agent");
        let folder = tempfile::tempdir_in(folder.parent().unwrap()).unwrap();
        fs::create_dir(folder.path().join("models")).unwrap();
        Machine(folder)
    }

    /// Where models are by default.
    fn models(&self) -> PathBuf {
        self.0.path().join("models")
    }

    fn profile(&self, arguments: &[&str]) -> Ended {
        let ended = self.run(arguments);
        assert!(ended.success, "{ended:?}");
        ended
    }

    fn refused(&self, arguments: &[&str]) -> String {
        let ended = self.run(arguments);
        assert!(!ended.success && ended.stdout.is_empty(), "{ended:?}");
        ended.stderr
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        let (stdout, stderr) = (self.0.path().join("stdout"), self.0.path().join("stderr"));
        let file = |path: &Path| Stdio::from(fs::File::create(path).unwrap());
        let (begun, clock) = (Instant::now(), Stopwatch::start());
        let mut child = Command::new(inputs::program("prima-node-agent"))
            .arg("profile")
            .args(arguments)
            .env("PRIMA_CACHE", self.0.path())
            .stdin(Stdio::null())
            .stdout(file(&stdout))
            .stderr(file(&stderr))
            .spawn()
            .unwrap();
        // What it has waited is known as long as it runs; looking takes more than looking at its memory.
        let (mut peak_bytes, mut waited, mut looked) = (0, Duration::ZERO, begun);
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            peak_bytes = peak_bytes.max(peak_memory(child.id()));
            if looked.elapsed() > WAITS_LOOK {
                (waited, looked) = (clock.waited(), Instant::now());
            }
            thread::sleep(Duration::from_millis(5));
        };
        Ended {
            took: without_waits(begun.elapsed(), waited),
            success: status.success(),
            stdout: fs::read_to_string(stdout).unwrap(),
            stderr: fs::read_to_string(stderr).unwrap(),
            peak_bytes,
        }
    }
}

impl Ended {
    /// The profile that was printed, which must be a valid one of the machine `name`.
    fn status(&self, name: &str) -> NodeProfileStatus {
        let profile = NodeProfile::from_yaml("stdout", &self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {self:?}"));
        assert_eq!(profile.metadata.name.as_deref(), Some(name));
        profile.status.unwrap()
    }
}

/// Where the member of this rank listens, by the plan that it was started with.
fn address_of_member(ring: &LocalRing, rank: usize) -> String {
    let command =
        fs::read_to_string(format!("/proc/{}/cmdline", ring.members()[rank].pid)).unwrap();
    let plan = command
        .split('\0')
        .skip_while(|argument| *argument != "--plan")
        .nth(1);
    let plan = plan.expect("the plan's path");
    let text = fs::read_to_string(plan).unwrap();
    let plan = RingPlan::from_yaml(plan, &text).unwrap();
    plan.spec.members[rank].address.clone()
}
