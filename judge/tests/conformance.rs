//! The golden cases of upstream's allocator (`../shared/conformance` beside the repository).
//!
//! `TESSERA_CONFORMANCE_CASES` names another folder of cases, such as a fresh set from `oracle generate --seed N`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

use tessera_allocator::Policy;
use tessera_judge::conformance::{self, Level};
use tessera_judge::scenario::Scenario;

#[test]
fn first_fit_gives_upstreams_very_result() {
    run(Policy::FirstFit, Level::Exact);
}

#[test]
fn binpack_has_upstreams_outcome() {
    run(Policy::Binpack, Level::Outcome);
}

#[test]
fn spread_has_upstreams_outcome() {
    run(Policy::Spread, Level::Outcome);
}

#[test]
fn random_has_upstreams_outcome() {
    run(Policy::Random, Level::Outcome);
}

#[test]
fn least_fragmentation_has_upstreams_outcome() {
    run(Policy::LeastFragmentation, Level::Outcome);
}

fn run(policy: Policy, level: Level) {
    let given = std::env::var_os("TESSERA_CONFORMANCE_CASES").map(PathBuf::from);
    let folder =
        given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/conformance/cases"));
    let Ok(entries) = std::fs::read_dir(&folder) else {
        eprintln!("SKIPPED: no conformance cases at {}", folder.display());
        return;
    };
    let mut wrong = Vec::new();
    let mut cases = 0;
    for file in entries.map(|e| e.unwrap().path()).filter(|f| f.extension().is_some_and(|e| e == "jsonl")) {
        for line in std::fs::read_to_string(file).unwrap().lines() {
            let scenario = Scenario::parse(line).unwrap();
            wrong.extend(conformance::compare(&scenario, &conformance::answer(&scenario, policy), level));
            cases += 1;
        }
    }
    let shown: Vec<String> = wrong
        .iter()
        .take(10)
        .map(|d| format!("{} on {}:\n  upstream {}\n  we       {}", d.case, d.node, d.expected, d.got))
        .collect();
    assert!(wrong.is_empty(), "{} of {cases} cases differ:\n{}", wrong.len(), shown.join("\n"));
}
