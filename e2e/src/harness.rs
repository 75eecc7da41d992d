//! Runs scenarios and trials as a test program would: filter, one line each, an exit code.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;

use crate::runner::{Figure, Outcome, Runner};
use crate::scenario::ScenarioFile;
use crate::trials::{self, Cluster};

/// What is to be run. Understands what `cargo test` passes on, as far as it applies: everything runs one after the other,
/// since scenarios look at all GPUs of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Parts of names; nothing selects everything.
    filters: Vec<String>,
    exact: bool,
    list: bool,
}

impl Selection {
    /// Reads the program's arguments.
    pub fn from_arguments(arguments: impl IntoIterator<Item = String>) -> Self {
        let mut selection = Self::default();
        for argument in arguments {
            match argument.as_str() {
                "--exact" => selection.exact = true,
                "--list" => selection.list = true,
                flag if flag.starts_with('-') => {}
                filter => selection.filters.push(filter.to_owned()),
            }
        }
        selection
    }

    /// Only the names are asked for.
    pub fn lists(&self) -> bool {
        self.list
    }

    fn selects(&self, name: &str) -> bool {
        let fits = |filter: &String| if self.exact { name == filter } else { name.contains(filter.as_str()) };
        self.filters.is_empty() || self.filters.iter().any(fits)
    }
}

/// The scenario files of this repository.
pub fn scenarios() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios")
}

/// What a trial came to: figures, or a reason why it was not made.
pub type TrialOutcome = anyhow::Result<Outcome>;

/// One thing to run.
pub struct Trial<'a> {
    /// Its name.
    pub name: String,
    /// What it does.
    pub run: LocalBoxFuture<'a, TrialOutcome>,
}

/// The trials of all scenario files.
fn scenario_trials(runner: &Runner) -> anyhow::Result<Vec<Trial<'static>>> {
    let trial = |file: ScenarioFile| {
        let runner = runner.clone();
        let name = format!("scenario/{}", file.name);
        Trial { name, run: Box::pin(async move { Ok(runner.run(&file).await?) }) }
    };
    Ok(ScenarioFile::read_all(&scenarios())?.into_iter().map(trial).collect())
}

/// Everything that there is to run against any cluster, with `more` that this one can do.
///
/// # Errors
/// A scenario file cannot be read or is no scenario.
pub fn everything(cluster: &Cluster, more: Vec<Trial<'static>>) -> anyhow::Result<Vec<Trial<'static>>> {
    let mut trials = scenario_trials(&Runner::new(cluster.client().clone(), cluster.gpu_nodes().clone()))?;
    trials.extend(trials::all(cluster));
    trials.extend(more);
    trials.extend(trials::last(cluster));
    Ok(trials)
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
    /// Runs what is selected, one after the other, and prints a line for each. Once `lost` ends, the trial under way has failed, and the
    /// others are not run: each would wait for the cluster, for up to a quarter of an hour.
    pub async fn of(selection: &Selection, trials: Vec<Trial<'_>>, lost: impl Future<Output = ()>) -> Self {
        let lost = lost.shared();
        let mut report = Self::default();
        for Trial { name, run } in trials.into_iter().filter(|trial| selection.selects(&trial.name)) {
            let began = Instant::now();
            let outcome = tokio::select! {
                biased;
                () = lost.clone() => Err(anyhow::anyhow!("the cluster is lost: nobody can read from it any more")),
                outcome = run => outcome,
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
            println!("SKIPPED: {name}: {reason}");
        }
        for name in &self.failed {
            println!("FAILED: {name}");
        }
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed.len(), self.skipped.len());
        if self.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
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

    fn selection(arguments: &[&str]) -> Selection {
        Selection::from_arguments(arguments.iter().map(|argument| (*argument).to_owned()))
    }

    #[test]
    fn flags_of_cargo_test_are_not_taken_for_filters() {
        assert!(selection(&["--test-threads=1", "--nocapture"]).selects("scenario/binpack"));
        assert!(selection(&["--test-threads=1", "pack"]).selects("scenario/binpack"));
        assert!(!selection(&["spread"]).selects("scenario/binpack"));
        assert!(!selection(&["--exact", "pack"]).selects("scenario/binpack"));
    }

    #[tokio::test]
    async fn a_failure_among_others_fails_the_whole_and_stops_nothing() {
        let trial =
            |name: &str, outcome: TrialOutcome| Trial { name: name.into(), run: Box::pin(async { outcome }) };
        let trials = vec![
            trial("a", Err(anyhow::anyhow!("no"))),
            trial("b", Ok(Outcome::Skipped("not here".into()))),
            trial("c", Ok(Outcome::Held(vec![]))),
        ];
        let report = Report::of(&Selection::default(), trials, pending()).await;
        assert_eq!((report.passed, report.failed.len(), report.skipped.len()), (1, 1, 1));
        assert_eq!(format!("{:?}", report.finish()), format!("{:?}", ExitCode::FAILURE));
    }

    #[tokio::test]
    async fn no_trial_waits_for_a_cluster_that_is_lost_and_none_begins_on_it() {
        let trial = |name: &str, run| Trial { name: name.into(), run };
        let trials = vec![
            trial("waits", Box::pin(pending())),
            trial("begins", Box::pin(async { panic!("it has begun") })),
        ];
        let report = Report::of(&Selection::default(), trials, ready(())).await;
        assert_eq!(report.failed, ["waits", "begins"]);
    }
}
