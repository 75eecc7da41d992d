//! Content and format of snapshot files.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;

use fixture::{Fixture, device, golden, share};
use tempfile::TempDir;
use tessera_cli::snapshot::{FileError, Snapshot};

fn fixture() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.tenant("trainer", "node-a", &device("aa"), "19Gi", "25");
    fixture.pending("waiting", share("1Gi", "0"));
    fixture.quota("team", serde_json::json!({"memory": "80Gi", "gpus": 1}));
    fixture
}

#[test]
fn saved_snapshot_is_read_back() {
    let directory = TempDir::new().unwrap();
    let Fixture { snapshot, .. } = fixture();
    for name in ["cluster.json", "cluster.json.gz"] {
        let path = directory.path().join(name);
        snapshot.save(&path).unwrap();
        assert_eq!(Snapshot::load(&path).unwrap(), snapshot);
    }
    let size = |name: &str| std::fs::metadata(directory.path().join(name)).unwrap().len();
    assert!(size("cluster.json.gz") < size("cluster.json") / 2);
}

#[test]
fn file_contains_only_fields_for_planning() {
    let mut written = Vec::new();
    fixture().snapshot.write_to(&mut written).unwrap();
    let text = String::from_utf8(written).unwrap();
    for secret in ["hunter2", "example/secret", "10.1.2.3"] {
        assert!(!text.contains(secret), "{secret} is in the file");
    }
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    golden("snapshot-v1.json", &(serde_json::to_string_pretty(&value).unwrap() + "\n"));
}

#[test]
fn reads_files_of_version_1() {
    // This file stays when the format has a version 2; the test above gets another one then.
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/snapshot-v1.json");
    assert_eq!(Snapshot::load(golden.as_ref()).unwrap(), fixture().snapshot);
}

#[test]
fn refuses_foreign_newer_and_damaged_files() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("file");
    let load = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Snapshot::load(&path).unwrap_err()
    };
    assert!(matches!(load("kind: Pod"), FileError::Foreign { source: Some(_), .. }));
    assert!(matches!(
        load(r#"{"kind": "Pod", "apiVersion": "v1"}"#),
        FileError::Foreign { source: None, .. }
    ));
    assert!(matches!(
        load(r#"{"kind": "TesseraSnapshot", "version": 2}"#),
        FileError::Newer { found: 2, .. }
    ));
    let damaged = load(r#"{"kind": "TesseraSnapshot", "version": 1, "pods": 3}"#);
    assert!(matches!(damaged, FileError::Damaged { .. }));
    let missing = Snapshot::load(&directory.path().join("none")).unwrap_err();
    assert!(matches!(missing, FileError::Read { .. }));
    assert!(missing.to_string().contains("create one with `kubectl tessera snapshot -o FILE`"));
}
