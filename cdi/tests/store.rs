//! Tests of the spec store: atomic, idempotent, and without changes to files of other programs.

use std::{collections::BTreeSet, fs, path::Path};

use tessera_cdi::{
    CdiDevice, CdiKind, ContainerEdits, Mount, Spec, SpecFile, SpecStore, SpecWriteOutcome,
    StoreError, ValidationError, Version,
};

fn kind() -> CdiKind {
    CdiKind::new("k8s.gpu.example", "claim").expect("a kind")
}

fn spec(entry: &str) -> Spec {
    let container_edits = ContainerEdits { env: vec![entry.to_owned()], ..Default::default() };
    let device = CdiDevice {
        name: "d".parse().expect("a name"),
        annotations: Default::default(),
        container_edits,
    };
    Spec::new(kind(), vec![device], ContainerEdits::default())
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).expect("a directory");
    entries
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect()
}

fn set<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

#[test]
fn write_creates_directory_and_leaves_no_temporary_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let deep = directory.path().join("var/run/cdi");
    let store = SpecStore::new(&deep);

    assert_eq!(
        store.write(&SpecFile::for_id(kind(), "u1"), &spec("A=1")).expect("written"),
        SpecWriteOutcome::Changed
    );
    assert_eq!(names(&deep), set(["k8s.gpu.example-claim_u1.json"]));
}

#[test]
fn rewriting_same_content_keeps_the_file() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().expect("a directory");
    let store = SpecStore::new(directory.path());
    let file = SpecFile::for_id(kind(), "u1");
    store.write(&file, &spec("A=1")).expect("written");
    let before = fs::metadata(store.path(&file)).expect("the file").ino();

    assert_eq!(store.write(&file, &spec("A=1")).expect("written"), SpecWriteOutcome::Unchanged);
    assert_eq!(fs::metadata(store.path(&file)).expect("the file").ino(), before);
    assert_eq!(store.write(&file, &spec("A=2")).expect("written"), SpecWriteOutcome::Changed);
    assert_eq!(store.read(&file).expect("read"), Some(spec("A=2")));
}

#[test]
fn reader_never_sees_partial_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = SpecStore::new(directory.path());
    let file = SpecFile::for_id(kind(), "u1");
    let long = |letter: &str| spec(&format!("A={}", letter.repeat(300_000)));
    store.write(&file, &long("x")).expect("written");

    let path = store.path(&file);
    let writer = std::thread::spawn(move || {
        for round in 0..40 {
            store.write(&file, &long(if round % 2 == 0 { "y" } else { "x" })).expect("written");
        }
    });
    while !writer.is_finished() {
        let content = fs::read(&path).expect("the file always exists");
        serde_json::from_slice::<Spec>(&content).expect("the file is always complete");
    }
    writer.join().expect("the writer");
}

#[test]
fn removing_missing_file_succeeds() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = SpecStore::new(directory.path());
    let file = SpecFile::for_id(kind(), "u1");
    assert!(!store.remove(&file).expect("no error"));
    store.write(&file, &spec("A=1")).expect("written");
    assert!(store.remove(&file).expect("removed"));
    assert!(names(directory.path()).is_empty());
}

#[test]
fn retain_removes_only_files_of_own_name_and_kind() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = SpecStore::new(directory.path());
    for id in ["kept", "removed"] {
        store.write(&SpecFile::for_id(kind(), id), &spec("A=1")).expect("written");
    }
    let foreign = [
        // A matching name with another kind, without kind, and not JSON.
        (
            "k8s.gpu.example-claim_other.json",
            r#"{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","devices":[]}"#,
        ),
        ("k8s.gpu.example-claim_nokind.json", "{}"),
        ("k8s.gpu.example-claim_text.json", "hello"),
        // Own kind with another name.
        ("vendor.json", r#"{"cdiVersion":"0.6.0","kind":"k8s.gpu.example/claim","devices":[]}"#),
        ("k8s.gpu.example-claim_gone.yaml", "kind: k8s.gpu.example/claim"),
    ];
    for (name, content) in foreign {
        fs::write(directory.path().join(name), content).expect("a file");
    }
    fs::create_dir(directory.path().join("k8s.gpu.example-claim_dir.json")).expect("a directory");
    fs::write(directory.path().join(".k8s.gpu.example-claim_gone.7-0.tmp"), "{\"cdi")
        .expect("a file");

    let cleaned = store.retain(&kind(), &set(["kept"])).expect("cleaned");

    assert_eq!(cleaned.removed, ["removed"]);
    let unmanaged: BTreeSet<_> = cleaned
        .unmanaged
        .iter()
        .map(|path| path.file_name().expect("a name").to_str().expect("UTF-8"))
        .collect();
    assert_eq!(
        unmanaged,
        BTreeSet::from([
            "k8s.gpu.example-claim_dir.json",
            "k8s.gpu.example-claim_nokind.json",
            "k8s.gpu.example-claim_other.json",
            "k8s.gpu.example-claim_text.json",
        ])
    );
    let mut expected = set(["k8s.gpu.example-claim_kept.json", "k8s.gpu.example-claim_dir.json"]);
    expected.extend(foreign.map(|(name, _)| name.to_owned()));
    assert_eq!(names(directory.path()), expected);
}

#[test]
fn foreign_file_is_neither_overwritten_nor_removed() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = SpecStore::new(directory.path());
    let file = SpecFile::for_id(kind(), "u1");
    let content = r#"{"cdiVersion":"0.6.0","kind":"nvidia.com/gpu","devices":[]}"#;
    fs::write(store.path(&file), content).expect("a file");

    let error = store.write(&file, &spec("A=1")).expect_err("not created by Tessera");
    assert!(matches!(error, StoreError::NotManaged { .. }), "{error}");
    assert!(!store.remove(&file).expect("no error"));
    assert_eq!(fs::read_to_string(store.path(&file)).expect("the file"), content);
}

#[test]
fn missing_directory_is_empty() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = SpecStore::new(directory.path().join("none"));
    assert!(store.ids(&kind()).expect("no error").is_empty());
    assert!(store.retain(&kind(), &BTreeSet::new()).expect("no error").removed.is_empty());
}

#[test]
fn invalid_spec_is_not_written() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = SpecStore::new(directory.path());
    let file = SpecFile::for_id(kind(), "u1");

    let empty = Spec { devices: vec![], ..spec("A=1") };
    let mut twice = spec("A=1");
    twice.devices.push(twice.devices[0].clone());
    let mut nothing = spec("A=1");
    nothing.devices[0].container_edits = ContainerEdits::default();
    let mut relative = spec("A=1");
    relative.container_edits.mounts = vec![Mount::bind(Path::new("etc/shadow"), Path::new("/x"))];
    let mut with_parent = spec("A=1");
    with_parent.container_edits.mounts =
        vec![Mount::bind(Path::new("/x"), Path::new("/dev/../etc/passwd"))];
    let low = Spec { cdi_version: Version::V0_3, ..spec("A=1") };
    let mut low_with_groups = low.clone();
    low_with_groups.container_edits.additional_gids = vec![1];

    let reasons =
        [empty, twice, nothing, spec("A"), relative, with_parent, low_with_groups].map(|spec| {
            match store.write(&file, &spec).expect_err("invalid") {
                StoreError::Invalid { source, .. } => source,
                other => panic!("{other}"),
            }
        });
    assert!(
        matches!(
            reasons,
            [
                ValidationError::NoDevices,
                ValidationError::DuplicateDevice(_),
                ValidationError::EmptyDevice(_),
                ValidationError::Environment(_),
                ValidationError::Path { field: "mounts.hostPath", .. },
                ValidationError::Path { field: "mounts.containerPath", .. },
                ValidationError::VersionTooLow { required: Version::V0_7, .. },
            ]
        ),
        "{reasons:?}"
    );
    assert!(names(directory.path()).is_empty());
}

#[test]
fn rejects_unknown_fields() {
    let json =
        serde_json::to_string(&spec("A=1")).expect("JSON").replacen('{', r#"{"surprise":1,"#, 1);
    let error = serde_json::from_str::<Spec>(&json).expect_err("an unknown field");
    assert!(error.to_string().contains("surprise"), "{error}");
}
