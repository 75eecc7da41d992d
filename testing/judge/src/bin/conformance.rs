//! `conformance`: golden scenarios of upstream's allocator against ours.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{Parser, ValueEnum};
use serde_json::json;
use tessera_allocator::Policy;
use tessera_judge::conformance::{self, Level};
use tessera_judge::scenario::Scenario;

/// Runs golden scenarios of upstream's allocator through ours and prints where the answers differ.
///
/// A golden scenario is a JSON object on a line of its own: Kubernetes objects, and under `results`
/// what upstream answers for every node (`oracle generate` and `oracle solve` make them). Under
/// `first-fit` every field must be equal; under the other policies the outcome must be. The last
/// line is `N passed, M failed`; the exit code is 1 if any failed.
///
/// To have the fits of another policy replayed on upstream: `--write-answers answers.jsonl`, then
/// `oracle compare --level L1 golden.jsonl answers.jsonl`.
#[derive(Parser)]
#[command(name = "conformance", version)]
struct Args {
    /// Files of scenarios, one JSON object per line, or directories of `.jsonl` files.
    #[arg(required = true, value_name = "DIR|FILE")]
    inputs: Vec<PathBuf>,
    /// The policy of the allocator.
    #[arg(long, value_enum, default_value = "first-fit")]
    policy: PolicyName,
    /// Print at most so many differences.
    #[arg(long, default_value_t = 20)]
    show: usize,
    /// Write our answers to this file, in the oracle's format.
    #[arg(long, value_name = "FILE")]
    write_answers: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum PolicyName {
    FirstFit,
    Binpack,
    Spread,
    Random,
    LeastFragmentation,
}

impl PolicyName {
    fn policy(self) -> Policy {
        match self {
            Self::FirstFit => Policy::FirstFit,
            Self::Binpack => Policy::Binpack,
            Self::Spread => Policy::Spread,
            Self::Random => Policy::Random,
            Self::LeastFragmentation => Policy::LeastFragmentation,
        }
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let policy = args.policy.policy();
    let level = if policy == Policy::FirstFit { Level::Exact } else { Level::Outcome };
    let mut answers_out = args.write_answers.as_deref().map(std::fs::File::create).transpose()?;
    let (mut passed, mut failed) = (0u64, 0u64);
    for file in files(&args.inputs)? {
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        let (mut in_file, mut wrong) = (0u64, 0u64);
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let place = || format!("{}, line {}", file.display(), i + 1);
            let scenario = Scenario::parse(line).with_context(place)?;
            if scenario.results.is_empty() {
                bail!(
                    "{}: no `results`: this is no golden case; `oracle solve` makes one of it",
                    place()
                );
            }
            let answers = conformance::answer(&scenario, policy);
            if let Some(out) = &mut answers_out {
                writeln!(out, "{}", json!({"name": scenario.name, "results": answers}))?;
            }
            let differences = conformance::compare(&scenario, &answers, level);
            in_file += 1;
            wrong += u64::from(!differences.is_empty());
            for difference in differences {
                if (failed + wrong) as usize <= args.show {
                    println!(
                        "{} on {}:\n  upstream {}\n  we       {}",
                        difference.case, difference.node, difference.expected, difference.got
                    );
                }
            }
        }
        println!(
            "{:>16}: {} passed, {wrong} failed",
            file.file_stem().unwrap_or_default().to_string_lossy(),
            in_file - wrong
        );
        passed += in_file - wrong;
        failed += wrong;
    }
    if passed + failed == 0 {
        bail!(
            "no golden case in {}",
            args.inputs.iter().map(|i| i.display().to_string()).collect::<Vec<_>>().join(", ")
        );
    }
    println!("{passed} passed, {failed} failed");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The files meant, in order.
fn files(inputs: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for input in inputs {
        if !input.is_dir() {
            files.push(input.clone());
            continue;
        }
        let entries =
            std::fs::read_dir(input).with_context(|| format!("cannot list {}", input.display()))?;
        let mut own: Vec<PathBuf> =
            entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
        own.retain(|path| path.extension().is_some_and(|e| e == "jsonl"));
        if own.is_empty() {
            bail!("{} has no .jsonl files", Path::display(input));
        }
        own.sort();
        files.extend(own);
    }
    Ok(files)
}
