use std::fs;

use super::*;
use crate::state::StatePaths;
use tessera_api::names::{ClaimName, ClaimUid, Namespace};

fn uid(text: &str) -> ClaimUid {
    ClaimUid::new(text).expect("a UID")
}

fn record(gpu: &str, memory_bytes: u64, cores_percent: u8) -> ClaimRecord {
    let gpu = tessera_api::names::GpuUuid::new(gpu).expect("a GPU UUID");
    let share = ShareRecord {
        index: 0,
        request: "gpu".parse().expect("a request"),
        pool: "node-a".parse().expect("a pool"),
        device: gpu.device_name(),
        share_id: None,
        gpu,
        memory_bytes,
        cores_percent,
        reserved: None,
        compute: ComputeCap::None,
        limit_percent: None,
        priority: ComputePriority::default(),
        oversubscribe: false,
        mps: false,
    };
    ClaimRecord {
        namespace: Namespace::new("ns").expect("a namespace"),
        name: ClaimName::new("claim").expect("a name"),
        state: RecordState::Started,
        library: "ab12".into(),
        intercept: Default::default(),
        context_bytes: 0,
        shares: vec![share],
        mig_devices: Vec::new(),
    }
}

const GPU: &str = "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77";

fn store(directory: &tempfile::TempDir) -> JournalStore {
    JournalStore::new(StatePaths::new(directory.path()))
}

#[test]
fn other_instance_reads_written_journal() {
    let directory = tempfile::tempdir().expect("a directory");
    let (one, two) = (store(&directory), store(&directory));
    assert!(two.lock().expect("locked").journal().claims.is_empty());

    one.lock().expect("locked").put(uid("a"), record(GPU, 1, 2)).expect("written");
    assert_eq!(two.lock().expect("locked").get(&uid("a")), Some(&record(GPU, 1, 2)));

    two.lock().expect("locked").remove(&uid("a")).expect("written");
    assert_eq!(one.lock().expect("locked").get(&uid("a")), None);
}

#[test]
fn lock_excludes_other_instance() {
    let directory = tempfile::tempdir().expect("a directory");
    let (one, two) = (store(&directory), store(&directory));
    let mut held = one.lock().expect("locked");

    let (done, wait) = std::sync::mpsc::channel();
    let waiting = std::thread::spawn(move || {
        let found = two.lock().expect("locked").get(&uid("a")).is_some();
        done.send(()).expect("the test waits");
        found
    });
    assert!(
        wait.recv_timeout(std::time::Duration::from_millis(50)).is_err(),
        "the lock was given twice"
    );
    held.put(uid("a"), record(GPU, 1, 2)).expect("written");
    drop(held);
    assert!(waiting.join().expect("the other"), "it read the content written under the lock");
}

#[test]
fn lock_that_is_held_too_long_is_an_error() {
    let directory = tempfile::tempdir().expect("a directory");
    let (one, two) = (store(&directory), store(&directory));
    let held = one.lock().expect("locked");
    let wait = std::time::Duration::from_millis(50);
    // Another instance, and another thread of the same.
    for store in [&two, &one] {
        let error = store.lock_within(wait).expect_err("held");
        assert!(matches!(error, JournalError::Busy { .. }), "{error}");
    }
    drop(held);
    one.lock_within(wait).expect("released");
    two.lock_within(wait).expect("released");
}

#[test]
fn watcher_is_notified_of_changes_only() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(&directory);
    let mut watch = store.watch();
    watch.mark_unchanged();

    store.lock().expect("locked").put(uid("a"), record(GPU, 1, 2)).expect("written");
    assert!(watch.has_changed().expect("open"));
    assert_eq!(watch.borrow_and_update().claims.len(), 1);

    store.lock().expect("locked").put(uid("a"), record(GPU, 1, 2)).expect("written");
    assert!(!watch.has_changed().expect("open"));
}

#[test]
fn unreadable_journal_is_refused_and_replaced() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(&directory);
    let path = directory.path().join("journal.json");
    for content in ["", "{", "[]", r#"{"version":1}"#, r#"{"version":1,"claims":{},"more":1}"#] {
        fs::write(&path, content).expect("written");
        let error = store.lock().expect_err("unreadable");
        assert!(matches!(error, JournalError::Unreadable { .. }), "{content:?}: {error}");
    }
    let mut rebuilt = Journal::default();
    rebuilt.claims.insert(uid("a"), record(GPU, 10, 20));
    let replaced = store.replace_unreadable(rebuilt.clone()).expect("replaced");
    let Replaced::Now { aside: Some(aside) } = replaced else {
        panic!("it was unreadable: {replaced:?}")
    };
    assert_eq!(fs::read_to_string(aside).expect("kept"), r#"{"version":1,"claims":{},"more":1}"#);
    assert_eq!(*store.lock().expect("locked").journal(), rebuilt);
}

#[test]
fn failed_replacement_keeps_unreadable_journal() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("journal.json");
    fs::write(&path, "{").expect("written");
    // The copy fails: its path is a directory.
    fs::create_dir(directory.path().join("journal.json.unreadable")).expect("made");
    store(&directory).replace_unreadable(Journal::default()).expect_err("not replaced");
    let error = store(&directory).lock().expect_err("unchanged");
    assert!(matches!(error, JournalError::Unreadable { .. }), "{error}");
}

#[test]
fn missing_journal_with_claim_files_is_not_empty() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(&directory);
    store.lock().expect("locked").put(uid("a"), record(GPU, 1, 2)).expect("written");
    fs::remove_file(directory.path().join("journal.json")).expect("removed");
    for below in ["grants/a/a-0", "ledgers/a/a-0"] {
        fs::create_dir_all(directory.path().join(below)).expect("made");
        let error = store.lock().expect_err("lost");
        assert!(matches!(error, JournalError::Lost { .. }), "{error}");
        fs::remove_dir_all(directory.path().join(below)).expect("removed");
    }
    assert!(store.lock().expect("nothing is prepared").is_new());

    fs::create_dir_all(directory.path().join("grants/a/a-0")).expect("made");
    let mut rebuilt = Journal::default();
    rebuilt.claims.insert(uid("a"), record(GPU, 10, 20));
    assert_eq!(
        store.replace_unreadable(rebuilt.clone()).expect("written"),
        Replaced::Now { aside: None }
    );
    assert_eq!(*store.lock().expect("locked").journal(), rebuilt);
}

#[test]
fn journal_rebuilt_by_other_instance_is_kept() {
    let directory = tempfile::tempdir().expect("a directory");
    let (one, two) = (store(&directory), store(&directory));
    fs::write(directory.path().join("journal.json"), "{").expect("written");
    one.replace_unreadable(Journal::default()).expect("replaced");
    one.lock().expect("locked").put(uid("new"), record(GPU, 1, 2)).expect("written");

    assert_eq!(two.replace_unreadable(Journal::default()).expect("checked"), Replaced::ByAnother);
    assert!(two.lock().expect("locked").get(&uid("new")).is_some());
}

#[test]
fn newer_journal_is_refused_and_kept() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("journal.json");
    let content = r#"{"version":6,"claims":"anything"}"#;
    fs::write(&path, content).expect("written");

    let error = store(&directory).lock().expect_err("newer");
    assert!(matches!(error, JournalError::Newer { found: 6, .. }), "{error}");
    assert!(error.to_string().contains("version 6"), "{error}");
    assert_eq!(fs::read_to_string(&path).expect("the file"), content);
}

#[test]
fn writes_oldest_sufficient_version() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(&directory);
    let written = || {
        let text = fs::read_to_string(directory.path().join("journal.json")).expect("the file");
        (text.contains(r#""version":2"#), text.contains("oversubscribe"))
    };
    let mut spills = record(GPU, 10, 20);
    spills.shares[0].oversubscribe = true;
    let mut locked = store.lock().expect("locked");
    locked.put(uid("plain"), record(GPU, 10, 20)).expect("written");
    assert_eq!(written(), (false, false), "older drivers read it");
    locked.put(uid("spills"), spills.clone()).expect("written");
    assert_eq!(written(), (true, true), "older drivers refuse it");
    drop(locked);
    assert_eq!(self::store(&directory).lock().expect("read").get(&uid("spills")), Some(&spills));
    store.lock().expect("locked").remove(&uid("spills")).expect("written");
    assert_eq!(written(), (false, false), "older drivers read it again");
}

#[test]
fn shares_held_to_less_need_version_4() {
    let mut journal = Journal::default();
    journal.claims.insert(uid("plain"), record(GPU, 10, 20));
    assert_eq!(journal.version(), 1);
    let mut held = record(GPU, 10, 20);
    held.shares[0].reserved = Some(Reserved { memory_bytes: 70, cores_percent: 60 });
    journal.claims.insert(uid("held"), held.clone());
    assert_eq!(journal.version(), 4);
    let gpu = tessera_api::names::GpuUuid::new(GPU).expect("a GPU UUID");
    assert_eq!(journal.memory_by_gpu()[&gpu], 80, "the reservation counts");
    let usage = journal.used_by_others(&uid("plain"), &gpu);
    assert_eq!((usage.memory_bytes, usage.cores_percent), (70, 60));
    let text = serde_json::to_string(&held).expect("serialized");
    assert_eq!(serde_json::from_str::<ClaimRecord>(&text).expect("read"), held);
}

#[test]
fn mig_devices_need_version_5_and_have_a_stable_format() {
    let mut journal = Journal::default();
    let device = r#"{"index":0,"request":"mig","pool":"node-a","device":"gpu-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77-mig-1g10gb-19-6","gpuInstance":1,"computeInstance":{"uuid":"MIG-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77","capabilityMajor":510,"capabilityMinors":[12,13]}}"#;
    let parsed: MigDeviceRecord = serde_json::from_str(device).expect("a record");
    assert_eq!(serde_json::to_string(&parsed).expect("JSON"), device);
    let mut of_claim = record(GPU, 1, 2);
    of_claim.mig_devices.push(parsed);
    journal.claims.insert(uid("a"), of_claim);
    assert_eq!(journal.version(), 5);
    assert_eq!(journal.devices_in_use().len(), 2);
    assert_eq!(journal.gpus_in_use().len(), 1);
}

#[test]
fn mps_claims_need_version_3() {
    let mut journal = Journal::default();
    journal.claims.insert(uid("a"), record(GPU, 10, 20));
    assert_eq!((journal.version(), journal.mps_gpus(None).len()), (1, 0));
    for name in ["b", "c"] {
        let mut by_mps = record(GPU, 5, 30);
        by_mps.shares[0].mps = true;
        journal.claims.insert(uid(name), by_mps);
    }
    let gpu = tessera_api::names::GpuUuid::new(GPU).expect("a GPU UUID");
    assert_eq!(journal.version(), 3);
    assert!(journal.mps_gpus(Some(&uid("b"))).contains(&gpu), "the other claim needs it");
    journal.claims.remove(&uid("c"));
    assert!(journal.mps_gpus(Some(&uid("b"))).is_empty() && journal.mps_gpus(None).contains(&gpu));
    let taken = journal.used_by_others(&uid("new"), &gpu);
    assert!(taken.by_mps && taken.by_intercept);
}

#[test]
fn sums_usage_of_other_claims() {
    let mut journal = Journal::default();
    journal.claims.insert(uid("a"), record(GPU, 10, 20));
    journal.claims.insert(uid("b"), record(GPU, 5, 30));
    journal.claims.insert(uid("c"), record("GPU-00000000-0000-0000-0000-000000000000", 7, 7));
    let gpu = tessera_api::names::GpuUuid::new(GPU).expect("a GPU UUID");

    journal.claims.get_mut(&uid("b")).expect("there").shares[0].oversubscribe = true;

    let of_b = GpuUsage {
        memory_bytes: 5,
        cores_percent: 30,
        is_fixed: false,
        by_mps: false,
        by_intercept: true,
    };
    let of_all = GpuUsage { memory_bytes: 15, cores_percent: 50, is_fixed: true, ..of_b };
    assert_eq!(journal.used_by_others(&uid("a"), &gpu), of_b);
    assert_eq!(journal.used_by_others(&uid("new"), &gpu), of_all);
    assert_eq!(journal.memory_by_gpu()[&gpu], 15);
}
