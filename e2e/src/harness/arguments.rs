//! Command line of a test program. It accepts libtest's arguments, so that `cargo test`, `cargo
//! nextest` and IDEs work.

use clap::{Parser, ValueEnum};

use super::Trial;

/// Maximum number of similar names in an error message.
const SUGGESTIONS: usize = 5;

/// Minimum similarity of a suggested name; 1 means equal.
const MIN_SIMILARITY: f64 = 0.75;

/// Run scenarios and trials one after the other, because each uses all GPUs of the cluster.
#[derive(Clone, Debug, Default, Parser)]
#[command(disable_version_flag = true)]
pub struct Arguments {
    /// Run only tests whose names contain one of these filters. A filter without a match is an
    /// error.
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
    /// Compare filters with whole names.
    #[arg(long)]
    exact: bool,
    /// Skip tests whose names contain this filter; may be repeated.
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
    /// Run only ignored tests. There are none.
    #[arg(long)]
    ignored: bool,
    #[command(flatten)]
    _without_effect: WithoutEffect,
}

/// Arguments of libtest without effect: tests run one after the other and are not captured.
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
    /// One line per test, and the number of tests.
    #[default]
    Pretty,
    /// One line per test.
    Terse,
}

/// Error for a filter that matches no test.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no test matches `{filter}`; {}", suggestions(.similar))]
pub struct UnmatchedFilter {
    /// The filter.
    filter: String,
    /// Similar test names, the most similar first.
    similar: Vec<String>,
}

fn suggestions(similar: &[String]) -> String {
    let list = "`--list` lists all";
    if similar.is_empty() {
        list.to_owned()
    } else {
        format!("similar: {} ({list})", similar.join(", "))
    }
}

impl Arguments {
    /// Returns true if the tests are listed and not run.
    pub fn is_list(&self) -> bool {
        self.list
    }

    /// Returns the trials that the arguments select, in the given order.
    ///
    /// # Errors
    /// Returns an error if a filter matches no trial.
    pub fn select(&self, trials: Vec<Trial>) -> Result<Vec<Trial>, UnmatchedFilter> {
        for filter in &self.filters {
            if !trials.iter().any(|trial| self.matches(filter, trial.name())) {
                return Err(UnmatchedFilter {
                    filter: filter.clone(),
                    similar: similar_names(filter, &trials),
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

    /// Returns the list of these trials in libtest's format.
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

/// Returns the test names most similar to the filter. The last part of a name is compared, too.
fn similar_names(filter: &str, trials: &[Trial]) -> Vec<String> {
    let last = |name: &str| name.rsplit('/').next().unwrap_or_default().to_owned();
    let similarity = |name: &str| {
        let whole = strsim::jaro_winkler(filter, name);
        whole.max(strsim::jaro_winkler(&last(filter), &last(name)))
    };
    let mut similar: Vec<(f64, &str)> =
        trials.iter().map(|trial| (similarity(trial.name()), trial.name())).collect();
    similar.retain(|(similarity, _)| *similarity >= MIN_SIMILARITY);
    similar.sort_by(|one, other| other.0.total_cmp(&one.0));
    similar.into_iter().take(SUGGESTIONS).map(|(_, name)| name.to_owned()).collect()
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
        names.map(|name| Trial::new(name, |_| async { Ok(Outcome::Passed(vec![])) })).into()
    }

    fn selected(words: &[&str]) -> Result<Vec<String>, UnmatchedFilter> {
        let selected = arguments(words).select(trials())?;
        Ok(selected.iter().map(|trial| trial.name().to_owned()).collect())
    }

    #[test]
    fn accepts_libtest_arguments() {
        let words =
            ["--test-threads=1", "--nocapture", "--show-output", "--color", "always", "pack"];
        assert_eq!(selected(&words).unwrap(), ["scenario/binpack"]);
        assert_eq!(selected(&["--test-threads", "1", "-Z", "unstable-options"]).unwrap().len(), 4);
        assert!(Arguments::try_parse_from(["cluster", "--no-such-flag"]).is_err());
    }

    #[test]
    fn selects_tests_that_match_any_filter() {
        assert_eq!(selected(&["pack", "soak"]).unwrap(), ["scenario/binpack", "trial/soak"]);
        assert_eq!(selected(&["--exact", "trial/soak"]).unwrap(), ["trial/soak"]);
        assert_eq!(selected(&["scenario", "--skip", "pack"]).unwrap(), ["scenario/spread"]);
        assert_eq!(selected(&["--ignored"]).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn filter_without_match_is_an_error() {
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
