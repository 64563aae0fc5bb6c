//! Prometheus: what the chart's alerts make of series, by promtool, which counts hours in no time; and a server that scrapes what runs.

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::command::run;
use crate::free_ports::free_address;
use crate::programs::{folder_made_by, program};
use crate::service::Service;
use crate::{http, inputs};

/// How long the series of a test last, in minutes: longer than any alert waits.
const MINUTES: u32 = 60;

/// Prometheus's own programs.
fn tool(name: &str) -> PathBuf {
    folder_made_by("prometheus", &["tests/monitoring/fetch.sh"]).join(name)
}

/// The chart's rules, as a file of Prometheus.
pub struct Rules {
    folder: TempDir,
    alerts: Vec<String>,
}

/// An alert that fires.
#[derive(Debug)]
pub struct Alert<'a> {
    pub name: &'a str,
    pub labels: &'a [(&'a str, &'a str)],
    pub summary: &'a str,
}

impl Rules {
    pub fn of_the_chart() -> Self {
        let mut helm = Command::new(program("helm"));
        helm.args(["template", "prima"])
            .arg(inputs::file("charts/prima"))
            .args([
                "--namespace",
                "prima",
                "--set",
                "prometheusRule.enabled=true",
            ])
            .args(["--show-only", "templates/monitoring/prometheus-rule.yaml"]);
        let yaml = run(helm, "").expect("the chart's rules");
        let rule: Value = serde_saphyr::from_str(&yaml).expect("YAML");
        let rules = rule["spec"]["groups"][0]["rules"]
            .as_array()
            .expect("rules");
        let name = |rule: &Value| rule["alert"].as_str().expect("a name").to_owned();
        let alerts = rules.iter().map(name).collect();
        let folder = tempfile::tempdir().expect("a folder");
        // JSON is YAML.
        fs::write(folder.path().join("rules.yaml"), rule["spec"].to_string()).expect("a file");
        Self { folder, alerts }
    }

    /// Where they are.
    pub fn file(&self) -> PathBuf {
        self.folder.path().join("rules.yaml")
    }

    /// Names of all alerts.
    pub fn alerts(&self) -> &[String] {
        &self.alerts
    }

    /// Whether, of all alerts, exactly these fire after an hour of these series.
    ///
    /// # Errors
    /// What promtool says.
    pub fn fire(&self, series: &Series, expected: &[Alert<'_>]) -> Result<(), String> {
        let tests = self.alerts.iter().map(|alert| {
            let fires: Vec<Value> = expected
                .iter()
                .filter(|expected| expected.name == alert)
                .map(|expected| self.fired(expected))
                .collect();
            json!({"eval_time": format!("{MINUTES}m"), "alertname": alert, "exp_alerts": fires})
        });
        let input = series
            .0
            .iter()
            .map(|(name, value)| json!({"series": name, "values": format!("{value}+0x{MINUTES}")}));
        let test = json!({
            "rule_files": ["rules.yaml"],
            "evaluation_interval": "1m",
            "tests": [{
                "interval": "1m",
                "input_series": input.collect::<Vec<_>>(),
                "alert_rule_test": tests.collect::<Vec<_>>(),
            }],
        });
        let file = self.folder.path().join("test.yaml");
        fs::write(&file, test.to_string()).expect("a file");
        let mut promtool = Command::new(tool("promtool"));
        promtool.args(["test", "rules"]).arg(&file);
        let output = promtool.output().expect("promtool");
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr)),
        }
    }

    /// As promtool expects an alert: with the labels and the description that its rule adds.
    fn fired(&self, alert: &Alert<'_>) -> Value {
        let text = fs::read_to_string(self.file()).expect("the rules");
        let spec: Value = serde_json::from_str(&text).expect("JSON");
        let rules = spec["groups"][0]["rules"].as_array().expect("rules");
        let rule = rules.iter().find(|rule| rule["alert"] == alert.name);
        let rule = rule.unwrap_or_else(|| panic!("no alert is called {}", alert.name));
        let mut labels = rule["labels"].clone();
        let mut description = rule["annotations"]["description"]
            .as_str()
            .expect("a description")
            .to_owned();
        for (name, value) in alert.labels {
            labels[name] = json!(value);
            description = description.replace(&format!("{{{{ $labels.{name} }}}}"), value);
        }
        assert!(!description.contains("{{"), "{description}");
        let annotations = json!({"summary": alert.summary, "description": description});
        json!({"exp_labels": labels, "exp_annotations": annotations})
    }
}

/// Series by name and labels, each with a value.
#[derive(Clone, Debug, Default)]
pub struct Series(Vec<(String, f64)>);

impl Series {
    /// What a program's /metrics says, with the labels of the target that Prometheus scraped.
    pub fn scraped(text: &str, target: &[(&str, &str)]) -> Self {
        let mut series = Vec::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, value)) = line.rsplit_once(' ') else {
                continue;
            };
            let value: f64 = value
                .parse()
                .unwrap_or_else(|_| panic!("no number: {line}"));
            let (name, own) = match name.split_once('{') {
                Some((name, labels)) => (name, labels.trim_end_matches('}').to_owned()),
                None => (name, String::new()),
            };
            let mut labels = own.clone();
            for (label, value) in target {
                // As `honorLabels` has it.
                if !own.contains(&format!("{label}=\"")) {
                    let separator = if labels.is_empty() { "" } else { "," };
                    let _ = write!(labels, "{separator}{label}=\"{value}\"");
                }
            }
            series.push((format!("{name}{{{labels}}}"), value));
        }
        Self(series)
    }

    /// With one more.
    pub fn and(mut self, series: &str, value: f64) -> Self {
        self.0.push((series.to_owned(), value));
        self
    }

    /// With all of others.
    pub fn with(mut self, others: Series) -> Self {
        self.0.extend(others.0);
        self
    }
}

/// What a server scrapes: a job, its address, and labels of the target.
pub struct Target<'a> {
    pub job: &'a str,
    pub address: SocketAddr,
    pub labels: Value,
}

/// A Prometheus that scrapes every second. Killed on drop.
pub struct Prometheus {
    _service: Service,
    address: SocketAddr,
    _folder: TempDir,
}

impl Prometheus {
    pub fn start(targets: &[Target<'_>], rules: &Path) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let jobs = targets.iter().map(|target| {
            json!({
                "job_name": target.job,
                "honor_labels": true,
                "static_configs": [{"targets": [target.address.to_string()], "labels": target.labels}],
            })
        });
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [rules],
            "scrape_configs": jobs.collect::<Vec<_>>(),
        });
        let file = folder.path().join("prometheus.yaml");
        fs::write(&file, config.to_string()).expect("a file");
        let address = free_address();
        let mut command = Command::new(tool("prometheus"));
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                folder.path().join("data").display()
            ))
            .arg(format!("--web.listen-address={address}"));
        let mut service = Service::start("prometheus", command, folder.path());
        service.wait_until(|| match http::get(address, "/-/ready") {
            Ok(answer) if answer.status == 200 => Ok(()),
            Ok(answer) => Err(answer.body),
            Err(error) => Err(error.to_string()),
        });
        Self {
            _service: service,
            address,
            _folder: folder,
        }
    }

    /// `data` of an answer of its API; panics if it is an error.
    pub fn api(&self, path: &str, parameters: &[(&str, &str)]) -> Value {
        let mut query = String::new();
        for (name, value) in parameters {
            let separator = if query.is_empty() { '?' } else { '&' };
            let _ = write!(query, "{separator}{name}={}", percent_encoded(value));
        }
        let answer = http::get(self.address, &format!("/api/v1/{path}{query}")).expect("an answer");
        let mut json = answer.json();
        assert_eq!(json["status"], "success", "{path} {parameters:?}: {json}");
        json["data"].take()
    }

    /// What a query answers now.
    pub fn query(&self, query: &str) -> Vec<Value> {
        let data = self.api("query", &[("query", query)]);
        data["result"].as_array().cloned().unwrap_or_default()
    }
}

fn percent_encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => encoded.push(char::from(byte)),
            byte => {
                let _ = write!(encoded, "%{byte:02X}");
            }
        }
    }
    encoded
}
