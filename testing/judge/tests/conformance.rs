//! Golden cases of upstream's allocator in `testing/data/conformance`.
//!
//! `make fuzz-allocator` compares fresh random cases.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use tessera_allocator::Policy;
use tessera_judge::conformance::{self, ComparisonLevel};
use tessera_judge::scenario::Scenario;
use tessera_test_support::data;

#[test]
fn first_fit_equals_upstreams_result() {
    run(Policy::FirstFit, ComparisonLevel::Exact);
}

#[test]
fn binpack_has_upstreams_outcome() {
    run(Policy::Binpack, ComparisonLevel::Outcome);
}

#[test]
fn spread_has_upstreams_outcome() {
    run(Policy::Spread, ComparisonLevel::Outcome);
}

#[test]
fn random_has_upstreams_outcome() {
    run(Policy::Random, ComparisonLevel::Outcome);
}

#[test]
fn least_fragmentation_has_upstreams_outcome() {
    run(Policy::LeastFragmentation, ComparisonLevel::Outcome);
}

fn run(policy: Policy, level: ComparisonLevel) {
    let mut wrong = Vec::new();
    let (mut cases, mut results) = (0, 0);
    for profile in data::golden_profiles() {
        for (i, case) in profile.cases.iter().enumerate() {
            let scenario = Scenario::parse(case).unwrap();
            assert!(
                !scenario.results.is_empty(),
                "{}.jsonl, line {}: no results",
                profile.name,
                i + 1
            );
            wrong.extend(conformance::compare(
                &scenario,
                &conformance::answer(&scenario, policy),
                level,
            ));
            cases += 1;
            results += scenario.results.len();
        }
    }
    println!("{policy:?}: {cases} golden cases, {results} node results");
    let shown: Vec<String> = wrong
        .iter()
        .take(10)
        .map(|d| {
            format!("{} on {}:\n  upstream {}\n  tessera  {}", d.case, d.node, d.expected, d.got)
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {results} results differ:\n{}", wrong.len(), shown.join("\n"));
}
