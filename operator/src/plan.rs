//! `prima plan`: what a set of machines would do with a model, from documents alone; and the way from documents to a
//! RingPlan that `prima run` takes, too. Decides what is printed and how; the planning itself is `prima-halda`'s.

mod table;
mod timeline;

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use prima_crds::quantity::rounded;
use prima_crds::v1alpha1::document::{API_VERSION, DocumentError};
use prima_crds::v1alpha1::model_profile::{ModelProfile, ModelProfileSpec};
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_crds::v1alpha1::ring_plan::{
    DEFAULT_CONCURRENT_REQUESTS, KvDtype, PlannedModel, PlannedWindow, RingMember, RingPlan,
    RingPlanError, RingPlanSpec, Speed,
};
use prima_halda::check::{Finding, check};
use prima_halda::plan::MemberReport;
use prima_halda::windows::Window;
use prima_halda::{Options, Plan, PlanError, PlanReport, plan_ring};
use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};

use crate::model_file::{ModelFile, ModelFileError};

#[derive(clap::Args)]
pub struct PlanArgs {
    /// The model: a GGUF file, or a ModelProfile document in YAML
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// The machines: NodeProfile documents, as `prima-node-agent profile -o yaml` or `kubectl get nodeprofiles -o yaml` writes
    /// them; - reads standard input
    #[arg(long, value_name = "YAML", num_args = 1.., required = true)]
    profiles: Vec<PathBuf>,
    /// Tokens that prompt and answer may have together [default: what the model was trained for, at most 8192]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    context: Option<u32>,
    /// Requests that may fill the context at the same time [default: 16 that share one context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    concurrency: Option<u16>,
    /// Tokens of a usual prompt
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    prompt: u32,
    /// Tokens of a usual answer
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    answer: u32,
    /// Number format of the KV cache, F16 or Q8_0; Q8_0 takes 0.53 of the memory
    #[arg(long, value_name = "DTYPE", default_value = "F16", value_parser = kv_dtype)]
    kv_dtype: KvDtype,
    /// Leave this machine out; may be repeated
    #[arg(long, value_name = "NAME")]
    exclude: Vec<String>,
    /// Give every machine at least one layer
    #[arg(long)]
    all: bool,
    /// The fewest machines that have to take part
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    min_nodes: u16,
    /// The machine that answers clients [default: the best]
    #[arg(long, value_name = "NAME")]
    rank0: Option<String>,
    /// How often a token goes round the ring [default: the best]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u16).range(1..=1024))]
    rounds: Option<u16>,
    /// Plan only rings whose first token comes within so many seconds of a usual prompt; further tokens may take longer for it
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u16).range(1..=3600))]
    first_token: Option<u16>,
    /// How many experts of a mixture tokens miss, in percent of what they would miss if they chose all alike; rings measure it, and a Model's
    /// status.expertMissPercent says it
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u8).range(1..=100))]
    expert_misses: u8,
    /// For people, or for programs
    #[arg(short, long, value_enum, default_value = "table")]
    output: Output,
    /// Draw one token's way round the ring into this file
    #[arg(long, value_name = "FILE.svg")]
    timeline: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Output {
    Table,
    Yaml,
    Json,
}

#[derive(Debug, thiserror::Error)]
pub enum PlanCommandError {
    #[error("cannot read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {}", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error(transparent)]
    Model(#[from] ModelFileError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("the plan fails its check, which is a mistake of the planner: {finding}")]
    Check { finding: Finding },
    #[error("the plan is no RingPlan, which is a mistake of the planner")]
    RingPlan(#[source] RingPlanError),
    #[error("cannot turn the plan into YAML")]
    Yaml(#[source] serde_saphyr::ser::Error),
    #[error("cannot turn the plan into JSON")]
    Json(#[source] serde_json::Error),
}

/// A key/value cache of a very long context would take more memory than the model; who wants one must ask for it.
const DEFAULT_CONTEXT: i32 = 8192;
/// Where agents listen unless told otherwise, and are measured by others; profiles name machines, not addresses.
pub const RING_PORT: u16 = 9190;
/// Larger documents than this are no profiles.
const MAX_DOCUMENT: u64 = 16 << 20;

/// Positions that a sequence may have unless somebody says otherwise: no more than the model was trained for.
pub fn default_context(model: &ModelProfileSpec) -> u32 {
    model.trained_context_length.min(DEFAULT_CONTEXT) as u32
}

/// How many requests run at once, and how many whole contexts have memory. Who asks for a number has a context for each request; otherwise some
/// share one.
pub fn concurrency(asked: Option<i32>) -> (i32, i32) {
    match asked {
        Some(requests) => (requests, requests),
        None => (DEFAULT_CONCURRENT_REQUESTS, 1),
    }
}

pub fn run(args: &PlanArgs) -> Result<(), PlanCommandError> {
    let model = read_model(&args.model)?;
    let mut nodes = Vec::new();
    for path in &args.profiles {
        nodes.extend(read_profiles(path)?);
    }
    let context = args.context.unwrap_or(default_context(&model.spec)) as usize;
    let (concurrent_requests, kv_contexts) = concurrency(args.concurrency.map(i32::from));
    let options = Options {
        context_tokens: context,
        concurrent_requests: concurrent_requests as usize,
        kv_contexts: kv_contexts as usize,
        prompt_tokens: args.prompt as usize,
        answer_tokens: args.answer as usize,
        exclude: args.exclude.clone(),
        use_all: args.all,
        min_nodes: args.min_nodes.into(),
        rank0: args.rank0.clone(),
        rounds: args.rounds.map(usize::from),
        first_token_seconds: args.first_token.map(f64::from),
        kv_dtype: args.kv_dtype,
        expert_misses: f64::from(args.expert_misses) / 100.0,
        ..Options::default()
    };
    let plan = checked(&model, &nodes, &options)?;
    let planned = PlannedModel::new(
        &model.metadata.name,
        args.model.display().to_string(),
        model.spec.size_bytes,
        model.spec.layers,
    );
    let members = members(&plan, |name| format!("{name}:{RING_PORT}"));
    let spec = RingPlanSpec {
        max_concurrent_requests: concurrent_requests,
        kv_contexts,
        windowed_sequences: plan.windowed_sequences as i32,
        chunk_positions: plan.report.chunk_positions as i32,
        kv_dtype: args.kv_dtype,
        rounds: plan.rounds as i32,
        predicted: Some(speed(&plan.report)),
        ..RingPlanSpec::new(planned, context as i32, members)
    };
    let ring_plan = RingPlan::new(&model.metadata.name, spec);
    ring_plan
        .spec
        .validate()
        .map_err(PlanCommandError::RingPlan)?;
    if let Some(path) = &args.timeline {
        std::fs::write(path, timeline::svg(&plan)).map_err(|source| PlanCommandError::Write {
            path: path.clone(),
            source,
        })?;
    }
    let text = match args.output {
        Output::Table => table::text(&plan.report),
        Output::Yaml => yaml(&ring_plan, &plan.report)?,
        Output::Json => json(&ring_plan, &plan.report)?,
    };
    // Whoever closed our stdout does not want to know.
    let _ = writeln!(io::stdout(), "{}", text.trim_end());
    Ok(())
}

/// A `--kv-dtype`.
pub fn kv_dtype(text: &str) -> Result<KvDtype, serde::de::value::Error> {
    KvDtype::deserialize(text.into_deserializer())
}

/// Plans, and has the plan checked by code that did not make it.
pub fn checked(
    model: &ModelProfile,
    nodes: &[NodeProfile],
    options: &Options,
) -> Result<Plan, PlanCommandError> {
    let plan = plan_ring(model, nodes, options)?;
    match check(&plan, model, nodes, options).into_iter().next() {
        Some(finding) => Err(PlanCommandError::Check { finding }),
        None => Ok(plan),
    }
}

/// The plan's members as a RingPlan has them, at the `address` of each name.
pub fn members(plan: &Plan, address: impl Fn(&str) -> String) -> Vec<RingMember> {
    plan.members
        .iter()
        .zip(&plan.report.members)
        .map(|(member, report)| {
            let (name, windows) = (member.name.clone(), windows(&member.windows));
            with_report(
                RingMember::new(name, address(&member.name), windows),
                report,
            )
        })
        .collect()
}

/// A member with what the planner says of its GPUs, its output head, its reading and its memory.
pub fn with_report(member: RingMember, report: &MemberReport) -> RingMember {
    RingMember {
        output_head_on_gpu: report.output_head_on_gpu,
        draft_on_gpu: report.draft_on_gpu,
        gpu_from_rows: report.gpu_from_rows.map(|rows| rows as i32),
        read_bytes_per_token: Some(report.read_bytes_per_token as i64),
        read_ahead_bytes: Some(report.read_ahead_bytes as i64),
        memory_bytes: Some(report.memory_bytes as i64),
        gpu_memory_bytes: Some(report.gpu_memory_bytes as i64),
        gpus: report.gpus.clone(),
        kv_bytes: Some(report.kv_bytes as i64),
        why: Some(report.why.clone()),
        ..member
    }
}

/// What a plan promises, as a RingPlan has it.
pub fn speed(report: &PlanReport) -> Speed {
    Speed {
        token_microseconds: (report.tpot_milliseconds * 1e3) as i64,
        first_token_microseconds: (report.ttft_milliseconds * 1e3) as i64,
    }
}

/// Windows as a RingPlan has them.
pub fn windows(windows: &[Window]) -> Vec<PlannedWindow> {
    windows
        .iter()
        .map(|window| PlannedWindow {
            first: window.first as i32,
            last: window.last as i32,
            gpu_layers: window.gpu_layers as i32,
        })
        .collect()
}

/// A NodeProfile from a file.
pub fn read_profile(path: &Path) -> Result<NodeProfile, PlanCommandError> {
    let name = path.display().to_string();
    Ok(NodeProfile::from_yaml(&name, &read_document(path)?)?)
}

/// The NodeProfiles of a file: one, or a list.
fn read_profiles(path: &Path) -> Result<Vec<NodeProfile>, PlanCommandError> {
    let name = path.display().to_string();
    Ok(NodeProfile::all_from_yaml(&name, &read_document(path)?)?)
}

/// A model by its header, or by its profile.
fn read_model(path: &Path) -> Result<ModelProfile, PlanCommandError> {
    let is_document = path.extension().is_some_and(|end| {
        ["yaml", "yml", "json"]
            .iter()
            .any(|known| end.eq_ignore_ascii_case(known))
    });
    if is_document {
        let name = path.display().to_string();
        return Ok(ModelProfile::from_yaml(&name, &read_document(path)?)?);
    }
    Ok(ModelFile::read(path)?.profile)
}

fn read_document(path: &Path) -> Result<String, PlanCommandError> {
    let read = || {
        let source: Box<dyn Read> = match path == Path::new("-") {
            true => Box::new(io::stdin()),
            false => Box::new(std::fs::File::open(path)?),
        };
        let mut text = String::new();
        source.take(MAX_DOCUMENT + 1).read_to_string(&mut text)?;
        match text.len() as u64 > MAX_DOCUMENT {
            true => Err(io::Error::other(format!(
                "it has more than {}, which no profiles have",
                rounded(MAX_DOCUMENT)
            ))),
            false => Ok(text),
        }
    };
    read().map_err(|source| PlanCommandError::Read {
        path: path.to_owned(),
        source,
    })
}

/// The report as a document beside the RingPlan.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ReportDocument<'a> {
    api_version: &'static str,
    kind: &'static str,
    report: &'a PlanReport,
}

fn yaml(plan: &RingPlan, report: &PlanReport) -> Result<String, PlanCommandError> {
    let report = ReportDocument {
        api_version: API_VERSION,
        kind: "PlanReport",
        report,
    };
    let plan = serde_saphyr::to_string(plan).map_err(PlanCommandError::Yaml)?;
    let report = serde_saphyr::to_string(&report).map_err(PlanCommandError::Yaml)?;
    Ok(format!("{}\n---\n{report}", plan.trim_end()))
}

fn json(plan: &RingPlan, report: &PlanReport) -> Result<String, PlanCommandError> {
    let both = serde_json::json!({"ringPlan": plan, "report": report});
    serde_json::to_string_pretty(&both).map_err(PlanCommandError::Json)
}
