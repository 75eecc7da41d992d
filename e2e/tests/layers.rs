//! Checks the dependencies between the workspace's crates against the table in
//! docs/design/architecture.md.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Dependencies of one crate within the workspace.
#[derive(Debug, Default, PartialEq, Eq)]
struct Dependencies {
    directory: String,
    shipped: BTreeSet<String>,
    tests: BTreeSet<String>,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Returns the rows of the document's table that name a crate of the workspace.
fn allowed() -> BTreeMap<String, Dependencies> {
    let document =
        std::fs::read_to_string(repository().join("docs/design/architecture.md")).unwrap();
    let words = |cell: &str| cell.split_whitespace().map(str::to_owned).collect();
    let rows = document.lines().filter(|line| line.starts_with("| tessera-"));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, directory, _purpose, shipped, tests] = cells[..] else {
            panic!("unexpected number of cells: {row}")
        };
        let entry = Dependencies {
            directory: directory.into(),
            shipped: words(shipped),
            tests: words(tests),
        };
        (name.to_owned(), entry)
    })
    .collect()
}

/// Returns the dependencies from `cargo metadata`.
fn actual() -> BTreeMap<String, Dependencies> {
    let cargo = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(repository())
        .output()
        .unwrap();
    assert!(cargo.status.success(), "{}", String::from_utf8_lossy(&cargo.stderr));
    let metadata: Value = serde_json::from_slice(&cargo.stdout).unwrap();
    metadata["packages"].as_array().unwrap().iter().map(package).collect()
}

fn package(package: &Value) -> (String, Dependencies) {
    let manifest = Path::new(package["manifest_path"].as_str().unwrap());
    let directory = manifest.parent().unwrap().strip_prefix(repository()).unwrap();
    let mut found =
        Dependencies { directory: directory.display().to_string(), ..Dependencies::default() };
    for dependency in package["dependencies"].as_array().unwrap() {
        let name = dependency["name"].as_str().unwrap();
        // Dependencies by path are crates of the workspace.
        if dependency["path"].is_string() {
            let kind =
                if dependency["kind"] == "dev" { &mut found.tests } else { &mut found.shipped };
            kind.insert(name.to_owned());
        }
    }
    (package["name"].as_str().unwrap().to_owned(), found)
}

#[test]
fn table_lists_every_crate_with_its_directory() {
    let rows: BTreeMap<_, _> =
        allowed().into_iter().map(|(name, row)| (name, row.directory)).collect();
    let crates: BTreeMap<_, _> =
        actual().into_iter().map(|(name, row)| (name, row.directory)).collect();
    assert_eq!(rows, crates);
}

#[test]
fn crates_have_only_allowed_dependencies() {
    let allowed = allowed();
    for (name, found) in actual() {
        let row = &allowed[&name];
        let tests: BTreeSet<_> = row.shipped.union(&row.tests).cloned().collect();
        assert!(found.shipped.is_subset(&row.shipped), "{name} depends on {:?}", found.shipped);
        assert!(found.tests.is_subset(&tests), "the tests of {name} depend on {:?}", found.tests);
    }
}

#[test]
fn shipped_crates_do_not_depend_on_test_crates() {
    let is_test_crate =
        |directory: &str| ["testing", "e2e"].iter().any(|at| directory.starts_with(at));
    let crates = actual();
    for (name, found) in crates.iter().filter(|(_, found)| !is_test_crate(&found.directory)) {
        for dependency in &found.shipped {
            assert!(
                !is_test_crate(&crates[dependency].directory),
                "{name} ships with {dependency}"
            );
        }
    }
}

#[test]
fn pure_crates_have_no_io_dependencies() {
    let impure = ["tokio", "kube", "axum", "hyper", "tonic", "rustix", "libc", "tempfile"];
    for name in ["api", "allocator", "index", "messages"] {
        let manifest = std::fs::read_to_string(repository().join(name).join("Cargo.toml")).unwrap();
        let shipped = manifest.split("[dev-dependencies]").next().unwrap();
        let table = shipped.split("[dependencies]").nth(1).unwrap();
        for line in table.lines() {
            let dependency = line.split(['=', '.', ' ']).next().unwrap();
            assert!(!impure.contains(&dependency), "{name} must not depend on {dependency}");
        }
    }
}
