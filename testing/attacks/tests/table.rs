//! The table of findings names only tests that exist.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// Returns the first cell and the tests of each row of the table.
fn rows() -> Vec<(String, Vec<String>)> {
    let text = fs::read_to_string(repository().join("testing/attacks/README.md")).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| finding"));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [finding, _attack, tests, _bound] = cells[..] else { panic!("not four cells: {row}") };
        (finding.to_owned(), tests.split('`').skip(1).step_by(2).map(str::to_owned).collect())
    })
    .collect()
}

fn exists(test: &str) -> bool {
    if let Some(trial) = test.strip_prefix("trial/") {
        let trials = fs::read_to_string(repository().join("e2e/src/trials.rs")).unwrap();
        return trials.contains(&format!("trial!(\"{trial}\""));
    }
    if let Some(scenario) = test.strip_prefix("scenario/") {
        return repository().join(format!("e2e/scenarios/{scenario}.yaml")).is_file();
    }
    let Some((file, name)) = test.split_once("::") else { return false };
    let text = fs::read_to_string(repository().join(file)).unwrap_or_default();
    let Some((before, _)) = text.split_once(&format!("fn {name}(")) else { return false };
    before
        .lines()
        .rev()
        .take(6)
        .any(|line| line.trim_start().contains("test]") || line.contains("test("))
}

#[test]
fn every_named_test_exists() {
    let missing: Vec<_> =
        rows().into_iter().flat_map(|(_, tests)| tests).filter(|test| !exists(test)).collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn every_row_names_a_test() {
    let rows = rows();
    let findings: BTreeSet<_> = rows.iter().map(|(finding, _)| finding.as_str()).collect();
    for finding in ["C1", "C2", "H1", "H2", "H3", "M1", "M2", "M3", "M4", "M5", "L1", "L2"] {
        assert!(findings.contains(finding), "{finding} has no row");
    }
    for (finding, tests) in &rows {
        assert!(!tests.is_empty(), "{finding} has no test");
    }
}
