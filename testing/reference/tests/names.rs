//! Holds the programs to the lists of events and metrics.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use regex::Regex;
use tessera_api::{events, metrics};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Directories of the programs that write events and export metrics.
const PROGRAMS: [&str; 5] =
    ["controller/src", "driver/src", "index/src", "messages/src", "mps/src"];

/// Returns the sources of the programs, without their unit tests, by path.
fn sources() -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut directories: Vec<PathBuf> = PROGRAMS.map(|program| root().join(program)).to_vec();
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let product = text.split("#[cfg(test)]").next().unwrap().to_owned();
                found.insert(path, product);
            }
        }
    }
    assert!(found.len() > 50, "sources are missing: {} files", found.len());
    found
}

#[test]
fn every_listed_event_is_written_somewhere() {
    let sources = sources();
    for (constant, reason) in events::ALL {
        let usage = Regex::new(&format!(r"\bevents::{constant}\b")).unwrap();
        let is_used = sources.values().any(|text| usage.is_match(text));
        assert!(is_used, "no program writes events::{constant} ({})", reason.name());
    }
}

#[test]
fn every_listed_metric_is_exported_somewhere() {
    let sources = sources();
    for (constant, metric) in metrics::ALL {
        let usage = Regex::new(&format!(r"\bmetrics::{constant}\b")).unwrap();
        let is_used = sources.values().any(|text| usage.is_match(text));
        assert!(is_used, "no program exports metrics::{constant} ({})", metric.name());
    }
}

#[test]
fn programs_name_events_and_metrics_by_their_lists_only() {
    let literal_metric =
        Regex::new(r#""tessera_(controller|driver|gpu|share|mps)_?[a-z_]*""#).unwrap();
    let registration = Regex::new(r#"\bregister(_with_unit)?\(\s*""#).unwrap();
    let reason = Regex::new(r#"reason: Some\("[A-Z]"#).unwrap();
    for (path, text) in sources() {
        for literal in [&literal_metric, &registration, &reason] {
            let found = literal.find(&text).map(|found| found.as_str());
            assert_eq!(found, None, "{}: use tessera_api::events or ::metrics", path.display());
        }
    }
}

#[test]
fn recording_rules_read_exported_metrics_only() {
    let path = root().join("deploy/chart/tessera/templates/recordingrules.yaml");
    let rules = std::fs::read_to_string(path).unwrap();
    let name = Regex::new(r"\btessera_[a-z_]+").unwrap();
    let exposed = |(_, metric): &(&str, metrics::MetricDescription)| {
        format!("{}{}", metric.name(), metric.kind().suffix())
    };
    let exported: Vec<_> = metrics::ALL.iter().map(exposed).collect();
    let read: Vec<_> = name.find_iter(&rules).map(|found| found.as_str()).collect();
    assert!(read.len() > 5, "{read:?}");
    for metric in read {
        assert!(exported.iter().any(|name| name == metric), "{metric} is not exported");
    }
}
