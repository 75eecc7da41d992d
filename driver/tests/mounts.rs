//! Ledgers on a real tmpfs. Each test runs itself again, as a child process in a user and mount
//! namespace.

mod fakes;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    process::Command,
    sync::Arc,
};

use fakes::{kubelet::Kubelet, node::Node};
use tessera_driver::state::mounts::{KernelMounts, Mounts, Tmpfs};
use tessera_intercept_abi::LEDGER_LEN;
use tessera_test_support::report_skip;

/// Environment variable of the child process that runs the test in its own namespaces.
const INSIDE: &str = "TESSERA_TEST_IN_NAMESPACE";

/// Returns true in the child process. Otherwise runs the test in a child, or skips it.
fn in_namespace(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let own = std::env::current_exe().expect("a path");
    // Removed after the child has exited: its mounts end with its namespace.
    let directory = tempfile::tempdir().expect("a directory");
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount"])
        .arg(own)
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .env("TMPDIR", directory.path())
        .output()
        .expect("unshare");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if err.contains("unshare failed") || err.contains("uid_map") {
        report_skip(test, format!("no namespaces here: {err}"));
        return false;
    }
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("1 passed"), "{out}{err}");
    false
}

/// Returns the mount points of ledgers.
fn mounted(node: &Node) -> Vec<String> {
    let prefix = node.path("state/ledgers").display().to_string();
    let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    points.filter(|point| point.starts_with(&prefix)).map(str::to_owned).collect()
}

#[test]
fn tmpfs_of_ledger_holds_exactly_the_ledger() {
    if !in_namespace("tmpfs_of_ledger_holds_exactly_the_ledger") {
        return;
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let node = Node::with_gpus(1);
        let driver =
            node.start_with(node.settings(), Arc::new(KernelMounts)).await.expect("it starts");
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        let claim = node.allocate("a", &[(0, 1, 0), (0, 1, 0)]);
        kubelet.prepare(claim.clone()).await.expect("prepared");
        let points = mounted(&node);
        assert_eq!(points.len(), 2, "{points:#?}");

        let path = format!("{}/ledger", points[0]);
        let ledger = File::options().read(true).write(true).open(&path).expect("the ledger");
        let length = LEDGER_LEN as u64;
        ledger.write_all_at(&vec![1; LEDGER_LEN], 0).expect("all of it is writable");
        let error = ledger.write_all_at(&[1], length).expect_err("nothing behind it");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        let error = File::create(format!("{}/another", points[0])).expect_err("nothing beside it");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);

        // A restart of the driver does not change the ledger.
        driver.stop().await;
        let _driver =
            node.start_with(node.settings(), Arc::new(KernelMounts)).await.expect("it starts");
        assert_eq!(mounted(&node), points);
        assert_eq!(fs::read(&path).expect("the ledger"), vec![1; LEDGER_LEN]);

        // The file stays open, as in a container.
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        kubelet.unprepare(claim).await.expect("unprepared");
        assert_eq!(mounted(&node), Vec::<String>::new());
        assert!(node.traces().is_empty(), "{:#?}", node.traces());
        ledger.write_all_at(&[2], 0).expect("an open ledger stays");
    });
}

#[test]
fn libraries_get_an_executable_tmpfs() {
    if !in_namespace("libraries_get_an_executable_tmpfs") {
        return;
    }
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let node = Node::with_gpus(1);
        fs::create_dir(node.path("state")).expect("made");
        let run = Tmpfs { size_bytes: 16 << 20, inodes: 1000, executable: false };
        KernelMounts.mount_tmpfs(&node.path("state"), run).expect("mounted");
        assert!(KernelMounts.forbids_execution(&node.path("state")).expect("checked"));

        let _driver =
            node.start_with(node.settings(), Arc::new(KernelMounts)).await.expect("it starts");
        let library = fs::read_dir(node.path("state/lib"))
            .expect("a directory")
            .next()
            .expect("one")
            .expect("an entry");
        assert!(!KernelMounts.forbids_execution(&library.path()).expect("checked"));
    });
}
