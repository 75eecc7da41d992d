//! Start of a driver after another one ended, died, or was replaced.

mod fakes;

use std::{fs, os::unix::fs::MetadataExt, sync::Arc};

use fakes::{
    gpus::gpu,
    kubelet::Kubelet,
    node::{Node, asked, claim, configured, share_id, uid},
};
use tessera_api::{
    Inventory,
    names::{ClaimName, ClaimUid, Namespace, PoolName},
};
use tessera_cdi::SpecStore;
use tessera_driver::{
    base_spec::{BaseDevice, BaseSpec},
    driver::DriverSettings,
    mps::Mps,
    prepare::{
        claim::PreparableClaim,
        execute::Executor,
        plan::{Installed, PrepareDecision, PublishedRatios, plan},
        step::{Step, UndoStep, steps, undo_steps},
    },
    state::{
        journal::{ClaimRecord, ComputeCap, Journal, JournalStore, RecordState},
        library::InstalledLibrary,
        mounts::{Mounts, Tmpfs},
        shares::ShareFiles,
    },
};

/// Executes single steps of a driver, and stops between any two of them.
struct StepRunner {
    journal: JournalStore,
    executor: Executor,
    claim: ClaimUid,
    record: ClaimRecord,
    steps: Vec<Step>,
}

impl StepRunner {
    /// Returns a runner for the claim `name`, which has two shares.
    fn of(node: &Node, name: &str) -> Self {
        Self::for_claim(node, name, claim(name, &[(0, 4, 10), (1, 4, 10)]))
    }

    /// Returns a runner for the claim `name`, which has one share by MPS.
    fn by_mps(node: &Node, name: &str) -> Self {
        let by_mps = serde_json::json!({"sharing": "MPS"});
        Self::for_claim(node, name, configured(name, &[(0, 4, 10)], &by_mps))
    }

    fn for_claim(node: &Node, name: &str, object: serde_json::Value) -> Self {
        let paths = node.paths();
        let journal = JournalStore::new(paths.clone());
        let library = InstalledLibrary::install(
            &node.path("intercept.so"),
            node.settings().intercept,
            &paths,
            &journal,
            &node.mounts,
        )
        .expect("installed");
        let object = serde_json::from_value(object).expect("a claim");
        let claim = PreparableClaim::check(
            &object,
            &ClaimUid::new(uid(name)).expect("a UID"),
            &Namespace::new("ns").expect("a namespace"),
            &ClaimName::new(name).expect("a name"),
            &PoolName::new("node-a").expect("a pool"),
        )
        .expect("allocated");
        let inventory = Inventory::new(vec![gpu(0), gpu(1)], vec![], vec![]);
        let installed = Installed { library: &library.hash, default_compute: ComputeCap::Balance };
        let decision =
            plan(&claim, &inventory, PublishedRatios::default(), &Journal::default(), &installed)
                .expect("it fits");
        let PrepareDecision::Prepare(record) = decision else { panic!("nothing is prepared") };
        let mps_gpus = record.mps_gpu().cloned().into_iter().collect();
        let steps = steps(&claim.uid, &record, mps_gpus, &paths).expect("steps");
        let specs = SpecStore::new(node.path("cdi"));
        let base = BaseSpec::new(specs.clone(), node.settings().driver_root);
        let gpus = [gpu(0), gpu(1)].map(|gpu| BaseDevice { gpu: gpu.uuid, minor: Some(gpu.minor) });
        base.update(&gpus, &Default::default()).expect("written");
        let files = ShareFiles::new(paths.clone(), Arc::new(node.mounts.clone()));
        let mps = Mps::new(&paths, true);
        let executor =
            Executor::new(files, specs, Arc::new(base), mps, Arc::new(node.gpus.clone()));
        Self { journal, executor, claim: claim.uid, record, steps }
    }

    fn undo_steps(&self) -> Vec<UndoStep> {
        undo_steps(&self.claim, &self.record, Default::default())
    }

    /// Takes the first steps. MPS daemons are always ready.
    fn take(&self, count: usize) {
        let steps = self.steps[..count].iter();
        for step in steps.filter(|step| !matches!(step, Step::AwaitMpsDaemon { .. })) {
            self.executor.take(step).expect("taken");
        }
    }

    fn record(&self, state: RecordState) {
        let record = ClaimRecord { state, ..self.record.clone() };
        self.journal.lock().expect("locked").put(self.claim.clone(), record).expect("written");
    }
}

#[tokio::test]
async fn death_after_any_step_of_prepare_leaves_nothing() {
    let count = StepRunner::of(&Node::with_gpus(2), "a").steps.len();
    assert_eq!(count, 7, "MPS request, base spec, two grants, two ledgers, claim spec");
    for done in 0..=count {
        let node = Node::with_gpus(2);
        let runner = StepRunner::of(&node, "a");
        runner.record(RecordState::Started);
        runner.take(done);
        drop(runner);

        let driver = node.start().await;
        assert!(node.traces().is_empty(), "after {done} steps: {:#?}", node.traces());
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        kubelet
            .prepare(node.allocate("a", &[(0, 4, 10), (1, 4, 10)]))
            .await
            .expect("prepared again");
        driver.stop().await;
    }
}

#[tokio::test]
async fn running_driver_rolls_back_claim_of_dead_instance() {
    for done in 0..=7 {
        let node = Node::with_gpus(2);
        let _driver = node.start().await;
        let runner = StepRunner::of(&node, "a");
        runner.record(RecordState::Started);
        runner.take(done);
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        // Allocated again meanwhile: one share, of the other GPU.
        let claim = node.allocate("a", &[(1, 2, 5)]);
        kubelet.prepare(claim.clone()).await.expect("prepared again");
        kubelet.unprepare(claim).await.expect("unprepared");
        assert!(node.traces().is_empty(), "after {done} steps: {:#?}", node.traces());
    }
}

#[tokio::test]
async fn next_unprepare_completes_an_interrupted_one() {
    let count = StepRunner::of(&Node::with_gpus(2), "a").undo_steps().len();
    for done in 0..=count {
        let node = Node::with_gpus(2);
        let runner = StepRunner::of(&node, "a");
        runner.record(RecordState::Completed);
        runner.executor.execute(&runner.steps).expect("taken");
        runner.executor.undo(&runner.undo_steps()[..done]).expect("undone");
        drop(runner);

        let driver = node.start().await;
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        kubelet.unprepare(asked("a")).await.expect("unprepared");
        assert!(node.traces().is_empty(), "after {done} steps: {:#?}", node.traces());
        driver.stop().await;
    }
}

#[tokio::test]
async fn death_after_any_mps_step_leaves_no_daemon_request() {
    let count = StepRunner::by_mps(&Node::with_gpus(2), "a").steps.len();
    assert_eq!(count, 6, "MPS request, MPS wait, base spec, grant, ledger, claim spec");
    for done in 0..=count {
        let node = Node::with_gpus(2);
        let runner = StepRunner::by_mps(&node, "a");
        runner.record(RecordState::Started);
        runner.take(done);
        drop(runner);
        assert_eq!(node.requested_daemons().len(), usize::from(done > 0));

        let driver = node.start().await;
        assert!(node.traces().is_empty(), "after {done} steps: {:#?}", node.traces());
        assert!(node.requested_daemons().is_empty(), "after {done} steps");
        driver.stop().await;
    }
}

#[tokio::test]
async fn interrupted_mps_unprepare_is_completed_by_the_next_one() {
    let count = StepRunner::by_mps(&Node::with_gpus(2), "a").undo_steps().len();
    assert_eq!(count, 4, "claim spec, ledger, grant, MPS release");
    for done in 0..=count {
        let node = Node::with_gpus(2);
        let runner = StepRunner::by_mps(&node, "a");
        runner.record(RecordState::Completed);
        runner.take(runner.steps.len());
        runner.executor.undo(&runner.undo_steps()[..done]).expect("undone");
        drop(runner);
        assert_eq!(node.requested_daemons().len(), usize::from(done < count));

        let driver = node.start().await;
        assert_eq!(node.requested_daemons().len(), 1, "the journal has the claim");
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        kubelet.unprepare(asked("a")).await.expect("unprepared");
        assert!(node.traces().is_empty(), "after {done} steps: {:#?}", node.traces());
        assert!(node.requested_daemons().is_empty(), "after {done} steps");
        driver.stop().await;
    }
}

#[tokio::test]
async fn failed_undo_step_keeps_daemon_request() {
    let node = Node::with_gpus(2);
    let runner = StepRunner::by_mps(&node, "a");
    runner.record(RecordState::Completed);
    runner.take(runner.steps.len());
    node.mounts.refuse_unmounts(true);
    runner.executor.undo(&runner.undo_steps()).expect_err("the ledger is mounted");
    assert_eq!(node.requested_daemons().len(), 1, "the claim stays in the journal");
    node.mounts.refuse_unmounts(false);
    runner.executor.undo(&runner.undo_steps()).expect("undone");
    assert!(node.requested_daemons().is_empty());
}

#[tokio::test]
async fn failed_step_undoes_those_before_it() {
    let node = Node::with_gpus(2);
    let _driver = node.start().await;
    // The last step fails: its file is a directory.
    let path = node.path(&format!("cdi/k8s.gpu.tessera.dev-claim_{}.json", uid("a")));
    fs::create_dir(&path).expect("a directory");
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 4, 10)])).await.expect_err("it fails");
    fs::remove_dir(&path).expect("still there, and empty");
    assert!(node.traces().is_empty(), "{:#?}", node.traces());
}

#[tokio::test]
async fn restart_changes_nothing_for_running_pods() {
    let node = Node::with_gpus(2);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 4, 10)]);
    let first = kubelet.prepare(claim.clone()).await.expect("prepared");
    let (before, slices) = (node.traces(), node.api.slices());
    let inodes = || -> Vec<_> {
        let mut inodes: Vec<_> =
            node.traces().iter().filter_map(|path| Some(fs::metadata(path).ok()?.ino())).collect();
        inodes.sort_unstable();
        inodes
    };
    let inodes_before = inodes();
    driver.stop().await;

    let _driver = node.start().await;
    assert_eq!((node.traces(), inodes()), (before, inodes_before));
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    assert_eq!(kubelet.prepare(claim).await.expect("prepared"), first);
    assert_eq!(node.api.slices(), slices, "nothing was written to the API");
}

#[tokio::test]
async fn dropped_driver_stops_its_tasks() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let stopping = driver.stopping();
    drop(driver);
    assert!(stopping.is_cancelled(), "a thread would run as long as the process");
}

#[tokio::test]
async fn upgrade_keeps_library_of_prepared_claims() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let old = node.allocate("old", &[(0, 1, 0)]);
    kubelet.prepare(old.clone()).await.expect("prepared");
    driver.stop().await;
    let spec = |name: &str| {
        fs::read_to_string(node.path(&format!("cdi/k8s.gpu.tessera.dev-claim_{}.json", uid(name))))
            .expect("a spec")
    };
    let libraries = || fs::read_dir(node.path("state/lib")).expect("a directory").count();
    let before = spec("old");

    fs::write(node.path("intercept.so"), "a newer library").expect("written");
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("new", &[(0, 1, 0)])).await.expect("prepared");
    assert_eq!(spec("old"), before);
    assert_ne!(spec("new").replace(&uid("new"), ""), before.replace(&uid("old"), ""));
    assert_eq!(libraries(), 2);
    kubelet.unprepare(old).await.expect("unprepared");
    driver.stop().await;

    let _driver = node.start().await;
    assert_eq!(libraries(), 1, "no claim uses the old one");
}

#[tokio::test]
async fn old_instance_of_update_prepares_with_its_library() {
    let node = Node::with_gpus(1);
    let newer = node.path("newer.so");
    fs::write(&newer, "a newer library").expect("written");
    let instance = |uid: &str| DriverSettings { pod_uid: Some(uid.to_owned()), ..node.settings() };
    let old = node.start_as(instance("old")).await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let new = DriverSettings { intercept_library: newer, ..instance("new") };
    let new = node.start_as(new).await;

    assert_eq!(kubelet.info.endpoint, old.sockets().plugin.display().to_string());
    kubelet.prepare(node.allocate("a", &[(0, 1, 0)])).await.expect("prepared");
    let spec = fs::read(node.path(&format!("cdi/k8s.gpu.tessera.dev-claim_{}.json", uid("a"))));
    let spec: tessera_cdi::Spec =
        serde_json::from_slice(&spec.expect("a spec")).expect("a CDI spec");
    for mount in &spec.container_edits.mounts {
        assert!(mount.host_path.exists(), "{} is not there", mount.host_path.display());
    }
    new.stop().await;
}

#[tokio::test]
async fn start_restores_missing_files_and_removes_unused_ones() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 4, 10)])).await.expect("prepared");
    driver.stop().await;
    let before = node.traces();

    let id = format!("{}-{}", uid("a"), share_id("a", 0));
    fs::remove_dir_all(node.path("cdi")).expect("removed");
    fs::remove_file(node.path(&format!("state/grants/{}/{id}/grant", uid("a")))).expect("removed");
    let stale = ["state/grants/stale/stale-0", "state/ledgers/stale/stale-0"];
    for path in stale {
        fs::create_dir_all(node.path(path)).expect("made");
    }
    let tmpfs = Tmpfs { size_bytes: 1, inodes: 1, executable: false };
    Mounts::mount_tmpfs(&node.mounts, &node.path(stale[1]), tmpfs).expect("mounted");
    fs::create_dir(node.path("cdi")).expect("made");
    let foreign = node.path("cdi/k8s.gpu.tessera.dev-claim_foreign.json");
    fs::write(&foreign, r#"{"kind": "other/kind"}"#).expect("written");

    let _driver = node.start().await;
    let mut expected = before;
    expected.insert(foreign.display().to_string());
    assert_eq!(node.traces(), expected);
}

#[tokio::test]
async fn unreadable_journal_is_rebuilt_from_api_server() {
    let node = Node::with_gpus(2);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let kept = node.allocate("kept", &[(0, 4, 10), (1, 1, 0)]);
    let gone = node.allocate("gone", &[(0, 4, 10)]);
    let first = kubelet.prepare(kept.clone()).await.expect("prepared");
    kubelet.prepare(gone.clone()).await.expect("prepared");
    node.allocate("never-prepared", &[(1, 1, 0)]);
    driver.stop().await;
    node.api.remove_claim("ns", "gone");
    fs::write(node.paths().journal(), "{ not a journal").expect("written");

    let _driver = node.start().await;
    let aside = fs::read_to_string(node.path("state/journal.json.unreadable")).expect("set aside");
    assert_eq!(aside, "{ not a journal");
    let traces = node.traces();
    assert!(
        !traces.iter().any(|trace| trace.contains(&uid("gone")) || trace.contains("never")),
        "{traces:#?}"
    );
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    assert_eq!(kubelet.prepare(kept.clone()).await.expect("prepared"), first);
    assert_eq!(node.traces(), traces, "nothing was missing");
    kubelet.unprepare(kept).await.expect("unprepared");
    assert!(node.traces().is_empty(), "{:#?}", node.traces());
}

#[tokio::test]
async fn journal_of_newer_driver_is_refused() {
    let node = Node::with_gpus(1);
    fs::create_dir_all(node.path("state")).expect("made");
    let content = r#"{"version": 99, "claims": {}}"#;
    fs::write(node.paths().journal(), content).expect("written");

    let error =
        node.start_with(node.settings(), Arc::new(node.mounts.clone())).await.expect_err("refused");
    assert!(
        format!("{error:#}").contains("has version 99, newer than 5 of this driver"),
        "{error:#}"
    );
    assert_eq!(fs::read_to_string(node.paths().journal()).expect("still there"), content);
    assert!(!node.path("kubelet").exists(), "it never registered");
}

#[tokio::test]
async fn two_instances_share_the_journal() {
    let node = Node::with_gpus(1);
    let instance = |uid: &str| DriverSettings { pod_uid: Some(uid.to_owned()), ..node.settings() };
    let old = node.start_as(instance("old")).await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let first = node.allocate("first", &[(0, 10, 0)]);
    kubelet.prepare(first.clone()).await.expect("prepared");

    let new = node.start_as(instance("new")).await;
    assert!(old.sockets().plugin.exists() && old.sockets().registration.exists());
    old.stop().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    assert_eq!(kubelet.info.endpoint, new.sockets().plugin.display().to_string());
    let second = kubelet.prepare(node.allocate("second", &[(0, 6, 0)])).await;
    second.expect("it fits beside the claim of the old instance");
    kubelet.unprepare(first).await.expect("the new instance unprepares claims of the old one");
    assert_eq!(node.claim_mounts().len(), 1);
}

#[tokio::test]
async fn deleted_journal_is_rebuilt_while_claims_are_prepared() {
    for lost in [&["state/journal.json"][..], &["state"][..]] {
        let node = Node::with_gpus(1);
        let driver = node.start().await;
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        let kept = node.allocate("kept", &[(0, 4, 10)]);
        let first = kubelet.prepare(kept.clone()).await.expect("prepared");
        kubelet.prepare(node.allocate("gone", &[(0, 4, 10)])).await.expect("prepared");
        node.allocate("never-prepared", &[(0, 1, 0)]);
        driver.stop().await;
        node.api.remove_claim("ns", "gone");
        for path in lost {
            let path = node.path(path);
            let removed =
                if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.expect("removed");
        }
        // Mounts of removed directories.
        for mount in node.mounts.all().into_keys().filter(|mount| !mount.exists()) {
            Mounts::unmount(&node.mounts, &mount).expect("unmounted");
        }

        let _driver = node.start().await;
        let traces = node.traces();
        assert!(
            !traces.iter().any(|trace| trace.contains("gone") || trace.contains("never")),
            "{traces:#?}"
        );
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        let journal = fs::read_to_string(node.paths().journal()).expect("a journal");
        assert!(journal.contains(&uid("kept")), "{journal}");
        assert_eq!(kubelet.prepare(kept.clone()).await.expect("prepared"), first);
        kubelet.unprepare(kept).await.expect("unprepared");
        assert!(node.traces().is_empty(), "{:#?}", node.traces());
    }
}

#[tokio::test]
async fn unknown_files_do_not_prevent_start() {
    let node = Node::with_gpus(1);
    for below in ["state/grants", "state/ledgers", "state/asked"] {
        fs::create_dir_all(node.path(below).join("Not A UID/deeper")).expect("made");
        fs::write(node.path(below).join("notes.txt"), "precious").expect("written");
    }
    let before = node.traces();
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 4, 10)]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    kubelet.unprepare(claim).await.expect("unprepared");
    assert_eq!(node.traces(), before, "unchanged");
}

#[tokio::test]
async fn failed_rollback_keeps_claim_in_journal() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    // The last step fails, and then the ledger cannot be unmounted.
    let path = node.path(&format!("cdi/k8s.gpu.tessera.dev-claim_{}.json", uid("a")));
    fs::create_dir(&path).expect("a directory");
    node.mounts.refuse_unmounts(true);
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 4, 10)]);
    kubelet.prepare(claim.clone()).await.expect_err("it fails");
    fs::remove_dir(&path).expect("still there, and empty");
    assert!(node.traces().contains(&uid("a")), "the journal has it: {:#?}", node.traces());
    kubelet.unprepare(claim.clone()).await.expect_err("the mount is still there");
    driver.stop().await;

    // The driver starts nevertheless.
    let _driver = node.start().await;
    assert!(node.traces().contains(&uid("a")), "the journal has it: {:#?}", node.traces());
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    node.mounts.refuse_unmounts(false);
    kubelet.unprepare(claim).await.expect("unprepared");
    assert!(node.traces().is_empty(), "{:#?}", node.traces());
}
