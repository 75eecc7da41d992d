//! Test harness for scenarios and trials: lists, filters and runs them, and reports the results.

mod arguments;

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser as _;
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use tessera_test_support::report_skip;

pub use self::arguments::{Arguments, UnmatchedFilter};
use crate::runner::{Figure, Outcome, Runner};
use crate::scenario::ScenarioFile;
use crate::trials::{self, Cluster};

/// Returns the directory of the scenario files of this repository.
pub fn scenario_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios")
}

/// Result of a trial: measured figures, or the reason why it was skipped.
pub type TrialOutcome = anyhow::Result<Outcome>;

/// An end-to-end test: a name, and a function that runs on a cluster.
pub struct Trial {
    name: String,
    run: Box<dyn FnOnce(Cluster) -> LocalBoxFuture<'static, TrialOutcome>>,
}

impl Trial {
    /// Creates a trial with the given name.
    pub fn new<F>(name: impl Into<String>, run: impl FnOnce(Cluster) -> F + 'static) -> Self
    where
        F: Future<Output = TrialOutcome> + 'static,
    {
        Self { name: name.into(), run: Box::new(|cluster| Box::pin(run(cluster))) }
    }

    /// Returns the name, for example `scenario/binpack` or `trial/soak`.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Debug for Trial {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_tuple("Trial").field(&self.name).finish()
    }
}

/// Returns one trial for each scenario file.
fn scenario_trials() -> anyhow::Result<Vec<Trial>> {
    let trial = |file: ScenarioFile| {
        let name = format!("scenario/{}", file.name);
        Trial::new(name, move |cluster| async move {
            let runner = Runner::new(cluster.client().clone(), cluster.gpu_nodes().clone());
            runner.run(&file).await
        })
    };
    let files = ScenarioFile::read_all(&scenario_directory())?;
    anyhow::ensure!(!files.is_empty(), "no scenario files in {}", scenario_directory().display());
    Ok(files.into_iter().map(trial).collect())
}

/// Returns all tests that run on any cluster, with `more` tests that need a specific cluster.
///
/// # Errors
/// Returns an error if a scenario file cannot be read or parsed.
pub fn all_trials(more: Vec<Trial>) -> anyhow::Result<Vec<Trial>> {
    let mut trials = scenario_trials()?;
    trials.extend(crate::examples::trials()?);
    trials.extend(trials::portable());
    trials.extend(more);
    trials.extend(trials::final_checks());
    Ok(trials)
}

/// Runs a test program. Lists the trials, or passes the selected ones to `run`, as the command line
/// requests.
///
/// No cluster is started if the trials are only listed. A filter that matches no trial ends the
/// program with exit code 2.
pub async fn main<F>(
    trials: anyhow::Result<Vec<Trial>>,
    run: impl FnOnce(Vec<Trial>) -> F,
) -> ExitCode
where
    F: Future<Output = anyhow::Result<Report>>,
{
    let arguments = Arguments::parse();
    let outcome = async {
        let selected = arguments.select(trials?)?;
        if arguments.is_list() {
            print!("{}", arguments.list(&selected));
            return Ok(ExitCode::SUCCESS);
        }
        let report = if selected.is_empty() { Report::default() } else { run(selected).await? };
        Ok(report.finish())
    };
    outcome.await.unwrap_or_else(|error: anyhow::Error| {
        eprintln!("error: {error:#}");
        if error.is::<UnmatchedFilter>() { ExitCode::from(2) } else { ExitCode::FAILURE }
    })
}

/// Results of all trials.
#[derive(Debug, Default)]
pub struct Report {
    passed: usize,
    failed: Vec<String>,
    skipped: Vec<(String, String)>,
    figures: Vec<Figure>,
}

impl Report {
    /// Creates a report without results: the machine lacks what the test program `name` needs.
    pub fn skipped(name: &str, reason: String) -> Self {
        Self { skipped: vec![(name.to_owned(), reason)], ..Self::default() }
    }

    /// Runs trials one after the other and prints a line for each.
    ///
    /// If `lost` completes, the current trial fails and the remaining trials are not run: each
    /// would wait for the cluster for up to 15 minutes.
    pub async fn run(
        trials: Vec<Trial>,
        cluster: &Cluster,
        lost: impl Future<Output = ()>,
    ) -> Self {
        let lost = lost.shared();
        let mut report = Self::default();
        for Trial { name, run } in trials {
            let began = Instant::now();
            let cluster = cluster.clone();
            let outcome = tokio::select! {
                biased;
                () = lost.clone() => Err(anyhow::anyhow!("cluster is lost: the API server does not respond")),
                outcome = AssertUnwindSafe(async { run(cluster).await }).catch_unwind() => {
                    outcome.unwrap_or_else(|panic| Err(anyhow::anyhow!("panicked: {}", panic_message(&*panic))))
                }
            };
            report.record(name, began, outcome);
        }
        report
    }

    fn record(&mut self, name: String, began: Instant, outcome: TrialOutcome) {
        match outcome {
            Ok(Outcome::Passed(figures)) => {
                println!("test {name} ... ok ({})", format_duration(began.elapsed()));
                self.passed += 1;
                self.figures.extend(figures);
            }
            Ok(Outcome::Skipped(reason)) => {
                println!("test {name} ... skipped");
                self.skipped.push((name, reason));
            }
            Err(error) => {
                println!("test {name} ... FAILED ({})", format_duration(began.elapsed()));
                println!("    {}", truncated(&format!("{error:#}")).replace('\n', "\n    "));
                self.failed.push(name);
            }
        }
    }

    /// Prints the summary: failed and skipped trials by name, and the figures.
    pub fn finish(mut self) -> ExitCode {
        println!();
        self.figures
            .sort_by(|one, other| (&one.name, one.duration).cmp(&(&other.name, other.duration)));
        for figures in self.figures.chunk_by(|one, other| one.name == other.name) {
            let at = |percent: usize| {
                format_duration(figures[(figures.len() - 1) * percent / 100].duration)
            };
            let (n, name) = (figures.len(), &figures[0].name);
            println!("FIGURE: {name}: p50 {}, p99 {}, max {} of {n}", at(50), at(99), at(100));
        }
        for (name, reason) in &self.skipped {
            report_skip(name, reason);
        }
        for name in &self.failed {
            println!("FAILED: {name}");
        }
        println!(
            "{} passed, {} failed, {} skipped",
            self.passed,
            self.failed.len(),
            self.skipped.len()
        );
        if self.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Returns the message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// Limit of a failure message, in bytes, for a report on some pods. Longer messages are truncated.
const MAX_MESSAGE_BYTES: usize = 12_000;

fn truncated(text: &str) -> String {
    let end = text.floor_char_boundary(MAX_MESSAGE_BYTES);
    if end < text.len() { format!("{}…", &text[..end]) } else { text.to_owned() }
}

fn format_duration(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        format!("{:.1} ms", time.as_secs_f64() * 1000.0)
    } else {
        format!("{:.1} s", time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    fn trial(name: &str, outcome: fn() -> TrialOutcome) -> Trial {
        Trial::new(name, async move |_| outcome())
    }

    /// A cluster that receives no requests.
    fn cluster() -> Cluster {
        Cluster::new(kube::Config::new("http://localhost:1".parse().unwrap()), None).unwrap()
    }

    #[tokio::test]
    async fn failed_trial_fails_run_and_others_still_run() {
        let trials = vec![
            trial("a", || Err(anyhow::anyhow!("failed"))),
            trial("b", || Ok(Outcome::Skipped("not here".into()))),
            trial("c", || panic!("three {}", "devices")),
            trial("d", || Ok(Outcome::Passed(vec![]))),
        ];
        let report = Report::run(trials, &cluster(), pending()).await;
        assert_eq!((report.passed, report.skipped.len()), (1, 1));
        assert_eq!(report.failed, ["a", "c"]);
        assert_eq!(format!("{:?}", report.finish()), format!("{:?}", ExitCode::FAILURE));
    }

    #[tokio::test]
    async fn lost_cluster_fails_all_remaining_trials() {
        let trials = vec![
            Trial::new("waits", |_| pending()),
            trial("begins", || panic!("the trial has started")),
        ];
        let report = Report::run(trials, &cluster(), ready(())).await;
        assert_eq!(report.failed, ["waits", "begins"]);
    }
}
