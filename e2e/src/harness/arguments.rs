//! The arguments of a test program: those of libtest, so that `cargo test`, `cargo nextest` and
//! IDEs can use it.

use clap::{Parser, ValueEnum};

use super::Trial;

/// Close names that an error lists at most.
const SUGGESTIONS: usize = 5;

/// Similarity from which a name is close; 1 is equal.
const CLOSE: f64 = 0.75;

/// Run scenarios and trials, one after the other: they look at all GPUs of the cluster.
#[derive(Clone, Debug, Default, Parser)]
#[command(disable_version_flag = true)]
pub struct Arguments {
    /// Run only tests whose names contain one of these. One that no name contains is an error.
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
    /// Compare filters with whole names.
    #[arg(long)]
    exact: bool,
    /// Leave out tests whose names contain this; may be given several times.
    #[arg(long, value_name = "FILTER")]
    skip: Vec<String>,
    /// List the tests and run none.
    #[arg(long)]
    list: bool,
    /// Format of the list: `pretty` ends with a count.
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT")]
    format: Format,
    /// Same as `--format terse`.
    #[arg(short, long)]
    quiet: bool,
    /// Only tests that are marked to be ignored, of which there are none.
    #[arg(long)]
    ignored: bool,
    #[command(flatten)]
    _without_effect: WithoutEffect,
}

/// Arguments of libtest that change nothing here: tests run one after the other and print as they
/// go.
#[derive(Clone, Debug, Default, clap::Args)]
struct WithoutEffect {
    #[arg(long, hide = true)]
    include_ignored: bool,
    #[arg(long, alias = "no-capture", hide = true)]
    nocapture: bool,
    #[arg(long, hide = true)]
    show_output: bool,
    #[arg(long, hide = true)]
    test: bool,
    #[arg(long, hide = true)]
    test_threads: Option<usize>,
    #[arg(long, hide = true)]
    color: Option<String>,
    #[arg(short = 'Z', hide = true)]
    unstable: Vec<String>,
}

/// Format of `--list`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A line for each test, and their number.
    #[default]
    Pretty,
    /// A line for each test.
    Terse,
}

/// A filter that is part of no test's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no test matches `{filter}`; {}", suggestions(.close))]
pub struct UnmatchedFilter {
    /// The filter.
    filter: String,
    /// Names that are spelt much like it, the closest first.
    close: Vec<String>,
}

fn suggestions(close: &[String]) -> String {
    let list = "`--list` lists all";
    if close.is_empty() {
        list.to_owned()
    } else {
        format!("similar: {} ({list})", close.join(", "))
    }
}

impl Arguments {
    /// Returns true if the tests are to be listed and not run.
    pub fn is_list(&self) -> bool {
        self.list
    }

    /// The trials that the arguments select, in the given order.
    ///
    /// # Errors
    /// A filter is part of no trial's name.
    pub fn select(&self, trials: Vec<Trial>) -> Result<Vec<Trial>, UnmatchedFilter> {
        for filter in &self.filters {
            if !trials.iter().any(|trial| self.matches(filter, trial.name())) {
                return Err(UnmatchedFilter {
                    filter: filter.clone(),
                    close: close(filter, &trials),
                });
            }
        }
        Ok(trials.into_iter().filter(|trial| self.selects(trial.name())).collect())
    }

    fn selects(&self, name: &str) -> bool {
        let is_filtered_in =
            self.filters.is_empty() || self.filters.iter().any(|filter| self.matches(filter, name));
        is_filtered_in
            && !self.ignored
            && !self.skip.iter().any(|filter| self.matches(filter, name))
    }

    fn matches(&self, filter: &str, name: &str) -> bool {
        if self.exact { name == filter } else { name.contains(filter) }
    }

    /// The list of these trials, as libtest prints it.
    pub fn list(&self, trials: &[Trial]) -> String {
        let mut list: String =
            trials.iter().map(|trial| format!("{}: test\n", trial.name())).collect();
        if self.format == Format::Pretty && !self.quiet {
            let plural = if trials.len() == 1 { "" } else { "s" };
            list += &format!("\n{} test{plural}, 0 benchmarks\n", trials.len());
        }
        list
    }
}

/// Names that are spelt much like the filter, or whose last part is; the closest first.
fn close(filter: &str, trials: &[Trial]) -> Vec<String> {
    let last = |name: &str| name.rsplit('/').next().unwrap_or_default().to_owned();
    let similarity = |name: &str| {
        let whole = strsim::jaro_winkler(filter, name);
        whole.max(strsim::jaro_winkler(&last(filter), &last(name)))
    };
    let mut close: Vec<(f64, &str)> =
        trials.iter().map(|trial| (similarity(trial.name()), trial.name())).collect();
    close.retain(|(similarity, _)| *similarity >= CLOSE);
    close.sort_by(|one, other| other.0.total_cmp(&one.0));
    close.into_iter().take(SUGGESTIONS).map(|(_, name)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::Outcome;

    fn arguments(words: &[&str]) -> Arguments {
        Arguments::try_parse_from([&["cluster"], words].concat()).unwrap()
    }

    fn trials() -> Vec<Trial> {
        let names = ["scenario/binpack", "scenario/spread", "trial/driver-restart", "trial/soak"];
        names.map(|name| Trial::new(name, |_| async { Ok(Outcome::Held(vec![])) })).into()
    }

    fn selected(words: &[&str]) -> Result<Vec<String>, UnmatchedFilter> {
        let selected = arguments(words).select(trials())?;
        Ok(selected.iter().map(|trial| trial.name().to_owned()).collect())
    }

    #[test]
    fn arguments_of_cargo_test_are_no_filters() {
        let words =
            ["--test-threads=1", "--nocapture", "--show-output", "--color", "always", "pack"];
        assert_eq!(selected(&words).unwrap(), ["scenario/binpack"]);
        assert_eq!(selected(&["--test-threads", "1", "-Z", "unstable-options"]).unwrap().len(), 4);
        assert!(Arguments::try_parse_from(["cluster", "--no-such-flag"]).is_err());
    }

    #[test]
    fn several_filters_select_what_one_of_them_does() {
        assert_eq!(selected(&["pack", "soak"]).unwrap(), ["scenario/binpack", "trial/soak"]);
        assert_eq!(selected(&["--exact", "trial/soak"]).unwrap(), ["trial/soak"]);
        assert_eq!(selected(&["scenario", "--skip", "pack"]).unwrap(), ["scenario/spread"]);
        assert_eq!(selected(&["--ignored"]).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_filter_that_matches_nothing_is_an_error() {
        let error = |words| selected(words).unwrap_err().to_string();
        assert_eq!(
            error(&["driver-restrat"]),
            "no test matches `driver-restrat`; similar: trial/driver-restart (`--list` lists all)"
        );
        assert_eq!(error(&["soak", "xyzzy"]), "no test matches `xyzzy`; `--list` lists all");
        assert!(error(&["--exact", "pack"]).starts_with("no test matches `pack`"));
        assert!(error(&["--exact", "scenario/soak"]).contains("similar: trial/soak"));
    }

    #[test]
    fn the_list_is_that_of_libtest() {
        let some = || arguments(&["scenario"]).select(trials()).unwrap();
        let names = "scenario/binpack: test\nscenario/spread: test\n";
        assert_eq!(
            arguments(&["--list"]).list(&some()),
            format!("{names}\n2 tests, 0 benchmarks\n")
        );
        assert_eq!(arguments(&["--list", "--format", "terse"]).list(&some()), names);
        assert_eq!(arguments(&["--list", "--format", "terse", "--ignored"]).list(&[]), "");
    }
}
