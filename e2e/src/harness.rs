//! Runs scenarios and trials as a test program does: it lists them, filters them, prints a line for
//! each, and ends with an exit code.

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

/// The scenario files of this repository.
pub fn scenarios() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios")
}

/// What a trial came to: figures, or a reason why it was not made.
pub type TrialOutcome = anyhow::Result<Outcome>;

/// A test: its name, and what it does on a cluster.
pub struct Trial {
    name: String,
    run: Box<dyn FnOnce(Cluster) -> LocalBoxFuture<'static, TrialOutcome>>,
}

impl Trial {
    /// A trial of that name.
    pub fn new<F>(name: impl Into<String>, run: impl FnOnce(Cluster) -> F + 'static) -> Self
    where
        F: Future<Output = TrialOutcome> + 'static,
    {
        Self { name: name.into(), run: Box::new(|cluster| Box::pin(run(cluster))) }
    }

    /// Its name, as `scenario/binpack` or `trial/soak`.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Debug for Trial {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_tuple("Trial").field(&self.name).finish()
    }
}

/// The trials of all scenario files.
fn scenario_trials() -> anyhow::Result<Vec<Trial>> {
    let trial = |file: ScenarioFile| {
        let name = format!("scenario/{}", file.name);
        Trial::new(name, move |cluster| async move {
            let runner = Runner::new(cluster.client().clone(), cluster.gpu_nodes().clone());
            Ok(runner.run(&file).await?)
        })
    };
    let files = ScenarioFile::read_all(&scenarios())?;
    anyhow::ensure!(!files.is_empty(), "no scenario files in {}", scenarios().display());
    Ok(files.into_iter().map(trial).collect())
}

/// Everything that there is to run against any cluster, with `more` that this one can do.
///
/// # Errors
/// A scenario file cannot be read or is no scenario.
pub fn everything(more: Vec<Trial>) -> anyhow::Result<Vec<Trial>> {
    let mut trials = scenario_trials()?;
    trials.extend(crate::examples::trials()?);
    trials.extend(trials::all());
    trials.extend(more);
    trials.extend(trials::last());
    Ok(trials)
}

/// The `main` of a test program: lists the trials or hands those selected to `run`, as the
/// program's arguments say.
///
/// Nothing is started where the trials are listed, or where a filter matches none of them: that
/// fails with exit code 2.
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

/// The result of all trials.
#[derive(Debug, Default)]
pub struct Report {
    passed: usize,
    failed: Vec<String>,
    skipped: Vec<(String, String)>,
    figures: Vec<Figure>,
}

impl Report {
    /// Nothing has run, since the machine lacks what the test program `name` needs.
    pub fn skipped(name: &str, reason: String) -> Self {
        Self { skipped: vec![(name.to_owned(), reason)], ..Self::default() }
    }

    /// Runs trials one after the other and prints a line for each. Once `lost` ends, the trial
    /// under way has failed, and the others are not run: each would wait for the cluster, for
    /// up to a quarter of an hour.
    pub async fn of(trials: Vec<Trial>, cluster: &Cluster, lost: impl Future<Output = ()>) -> Self {
        let lost = lost.shared();
        let mut report = Self::default();
        for Trial { name, run } in trials {
            let began = Instant::now();
            let cluster = cluster.clone();
            let outcome = tokio::select! {
                biased;
                () = lost.clone() => Err(anyhow::anyhow!("the cluster is lost: nobody can read from it any more")),
                outcome = AssertUnwindSafe(async { run(cluster).await }).catch_unwind() => {
                    outcome.unwrap_or_else(|panic| Err(anyhow::anyhow!("panicked: {}", message(&*panic))))
                }
            };
            report.note(name, began, outcome);
        }
        report
    }

    fn note(&mut self, name: String, began: Instant, outcome: TrialOutcome) {
        match outcome {
            Ok(Outcome::Held(figures)) => {
                println!("test {name} ... ok ({})", short(began.elapsed()));
                self.passed += 1;
                self.figures.extend(figures);
            }
            Ok(Outcome::Skipped(reason)) => {
                println!("test {name} ... skipped");
                self.skipped.push((name, reason));
            }
            Err(error) => {
                println!("test {name} ... FAILED ({})", short(began.elapsed()));
                println!("    {}", shortened(&format!("{error:#}")).replace('\n', "\n    "));
                self.failed.push(name);
            }
        }
    }

    /// Prints the summary: failed and skipped by name, and the figures.
    pub fn finish(mut self) -> ExitCode {
        println!();
        self.figures.sort_by(|one, other| (&one.of, one.took).cmp(&(&other.of, other.took)));
        for figures in self.figures.chunk_by(|one, other| one.of == other.of) {
            let at = |percent: usize| short(figures[(figures.len() - 1) * percent / 100].took);
            let (n, of) = (figures.len(), &figures[0].of);
            println!("FIGURE: {of}: p50 {}, p99 {}, max {} of {n}", at(50), at(99), at(100));
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

/// The message of a panic.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// Nobody reads more of it.
const MOST_SAID: usize = 3000;

fn shortened(text: &str) -> String {
    let end = text.floor_char_boundary(MOST_SAID);
    if end < text.len() { format!("{}…", &text[..end]) } else { text.to_owned() }
}

fn short(time: Duration) -> String {
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

    /// A cluster that nothing asks for anything.
    fn cluster() -> Cluster {
        Cluster::new(kube::Config::new("http://localhost:1".parse().unwrap()), None).unwrap()
    }

    #[tokio::test]
    async fn a_failed_trial_fails_the_run_and_stops_nothing() {
        let trials = vec![
            trial("a", || Err(anyhow::anyhow!("no"))),
            trial("b", || Ok(Outcome::Skipped("not here".into()))),
            trial("c", || panic!("three {}", "devices")),
            trial("d", || Ok(Outcome::Held(vec![]))),
        ];
        let report = Report::of(trials, &cluster(), pending()).await;
        assert_eq!((report.passed, report.skipped.len()), (1, 1));
        assert_eq!(report.failed, ["a", "c"]);
        assert_eq!(format!("{:?}", report.finish()), format!("{:?}", ExitCode::FAILURE));
    }

    #[tokio::test]
    async fn no_trial_waits_for_a_lost_cluster_or_begins_on_it() {
        let trials =
            vec![Trial::new("waits", |_| pending()), trial("begins", || panic!("it has begun"))];
        let report = Report::of(trials, &cluster(), ready(())).await;
        assert_eq!(report.failed, ["waits", "begins"]);
    }
}
