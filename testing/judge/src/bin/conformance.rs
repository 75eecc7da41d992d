//! `conformance`: compares Tessera's allocator with golden scenarios of upstream's.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{Parser, ValueEnum};
use serde_json::json;
use tessera_allocator::Policy;
use tessera_judge::conformance::{self, ComparisonLevel};
use tessera_judge::scenario::Scenario;

/// Run golden scenarios of upstream's allocator on Tessera's and print the differences.
///
/// A golden scenario is a JSON object on one line: Kubernetes objects, and in `results` upstream's
/// result for each node (made by `oracle generate` and `oracle solve`). Under `first-fit` every
/// field must be equal, under the other policies the outcome. The last line is `N passed, M
/// failed`; the exit code is 1 if any failed.
///
/// To replay the allocations of another policy on upstream: `--write-answers answers.jsonl`, then
/// `oracle compare --level L1 golden.jsonl answers.jsonl`.
#[derive(Parser)]
#[command(name = "conformance", version)]
struct ConformanceArgs {
    /// Files with one scenario per line, or directories of `.jsonl` files.
    #[arg(required = true, value_name = "DIR|FILE")]
    inputs: Vec<PathBuf>,
    /// Policy of the allocator.
    #[arg(long, value_enum, default_value = "first-fit")]
    policy: PolicyName,
    /// Maximum number of printed differences.
    #[arg(long, default_value_t = 20)]
    show: usize,
    /// File for Tessera's results, in the oracle's format.
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
    let args = ConformanceArgs::parse();
    let policy = args.policy.policy();
    let level =
        if policy == Policy::FirstFit { ComparisonLevel::Exact } else { ComparisonLevel::Outcome };
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
                    "{}: not a golden case, because `results` is missing; add it with `oracle solve`",
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
                        "{} on {}:\n  upstream {}\n  tessera  {}",
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
            "no golden cases in {}",
            args.inputs.iter().map(|i| i.display().to_string()).collect::<Vec<_>>().join(", ")
        );
    }
    println!("{passed} passed, {failed} failed");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the input files, directories expanded and sorted.
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
            bail!("no .jsonl files in {}", Path::display(input));
        }
        own.sort();
        files.extend(own);
    }
    Ok(files)
}
