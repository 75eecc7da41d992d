//! Tests of the supervisor process with a fake of NVIDIA's program.

mod testbed;

use std::{fs, os::unix::fs::PermissionsExt, time::Instant};

use tessera_mps_protocol::{
    MpsDaemonState, MpsDaemonStatus, supervisor_is_running, supervisor_pid,
};
use tessera_test_support::test_name;
use testbed::{TestBed, eventually, gpu, identity};

#[test]
fn wanted_gpu_gets_daemon_with_own_shared_memory() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let _supervisor = testbed.supervisor();
    testbed.want(&[1, 2]);
    for digit in [1, 2] {
        assert_eq!(
            testbed.ready(digit),
            MpsDaemonStatus { state: MpsDaemonState::Ready, message: String::new(), starts: 1 }
        );
        let (daemon, gpu) = (testbed.daemon(digit), gpu(digit));
        assert_eq!(daemon.sees("/dev/shm"), identity(&testbed.paths.shm(&gpu)));
        let mode = |path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        assert_eq!(mode(testbed.paths.shm(&gpu)), 0o1777);
        for path in [testbed.paths.pipe(&gpu), testbed.paths.daemon(&gpu), testbed.paths.daemons()]
        {
            assert_eq!(mode(path), 0o755, "a server may run as any user");
        }
        assert!(testbed.paths.pipe(&gpu).join("control").exists());
    }
    assert_ne!(testbed.daemon(1).sees("/dev/shm"), testbed.daemon(2).sees("/dev/shm"));
    assert_ne!(
        identity("/dev/shm".as_ref()),
        testbed.daemon(1).sees("/dev/shm"),
        "other namespaces are unchanged"
    );
}

#[test]
fn unwanted_daemon_is_removed_and_can_be_restarted() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let _supervisor = testbed.supervisor();
    for _ in 0..2 {
        testbed.want(&[1]);
        assert_eq!(testbed.ready(1).starts, 1);
        let daemon = testbed.daemon(1);
        testbed.want(&[]);
        testbed.gone(1);
        assert!(daemon.is_gone());
    }
}

#[test]
fn ready_status_means_running_daemon() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let _supervisor = testbed.supervisor_with(|supervisor| {
        supervisor.args(["--poll-interval", "1ms"]);
    });
    for reads in 0..25 {
        testbed.want(&[]);
        // The reads only vary the moment at which the supervisor sees the request.
        for _ in 0..reads * 5 {
            let _ = MpsDaemonStatus::read(&testbed.paths, &gpu(1));
        }
        testbed.want(&[1]);
        testbed.ready(1);
        assert!(testbed.answers(1), "after {reads} reads");
    }
}

#[test]
fn files_not_named_after_gpu_are_ignored() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    testbed.want(&[1]);
    fs::write(testbed.paths.wanted().join("README"), "").expect("written");
    let _supervisor = testbed.supervisor();
    testbed.ready(1);
    assert_eq!(fs::read_dir(testbed.paths.daemons()).expect("there").count(), 1);
}

#[test]
fn killed_daemon_restarts_with_same_directories() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let _supervisor = testbed.supervisor_with(|supervisor| testbed.redirect_log(supervisor));
    testbed.want(&[1]);
    testbed.ready(1);
    let inodes =
        || [testbed.paths.pipe(&gpu(1)), testbed.paths.shm(&gpu(1))].map(|path| identity(&path));
    let before = inodes();
    testbed.daemon(1).kill();
    testbed.status(1, "is ready again", |status| {
        status.state == MpsDaemonState::Ready && status.starts == 2
    });
    // The status has this message for a second only.
    let log = testbed.log();
    assert!(log.contains("SIGKILL") && log.contains("Starting control daemon"), "{log}");
    assert_eq!(inodes(), before, "mounted in containers");
}

#[test]
fn tenant_files_block_neither_restart_nor_removal() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let _supervisor = testbed.supervisor();
    testbed.want(&[1]);
    testbed.ready(1);
    let pipe = testbed.paths.pipe(&gpu(1));
    fs::create_dir_all(pipe.join("x.pid/y")).expect("made");
    assert_eq!(testbed::nest(&pipe, 100), 100);
    std::os::unix::fs::symlink("/etc/passwd", pipe.join("link.pid")).expect("made");
    fs::read(pipe.join("link.pid")).expect_err("links are not followed");
    testbed.daemon(1).kill();
    testbed.status(1, "is ready again", |status| {
        status.state == MpsDaemonState::Ready && status.starts == 2
    });
    assert!(pipe.join("x.pid/y").exists() && fs::symlink_metadata(pipe.join("link.pid")).is_err());
    assert!(testbed::nest(&pipe, 5000) < 256, "limited by the tmpfs");
    testbed.want(&[]);
    testbed.gone(1);
}

#[test]
fn full_pipe_or_log_directory_fills_nothing_else() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let _supervisor = testbed.supervisor();
    testbed.want(&[1]);
    testbed.ready(1);
    for (directory, size) in
        [(testbed.paths.pipe(&gpu(1)), 1 << 20), (testbed.paths.log(&gpu(1)), 16 << 20)]
    {
        let error = fs::write(directory.join("much"), vec![0; size + 1]).expect_err("too large");
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        assert_ne!(
            identity(&directory).0,
            identity(&testbed.paths.daemon(&gpu(1))).0,
            "another file system"
        );
    }
    fs::write(testbed.paths.daemon(&gpu(1)).join("more"), vec![0; 32 << 20])
        .expect("space is left");
    testbed.want(&[]);
    testbed.gone(1);
}

#[test]
fn killed_supervisor_kills_daemons_and_next_restarts_them() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let supervisor = testbed.supervisor();
    testbed.want(&[1, 2]);
    let (_, _) = (testbed.ready(1), testbed.ready(2));
    let daemons = [1, 2].map(|digit| testbed.daemon(digit));
    let inodes =
        || [testbed.paths.pipe(&gpu(1)), testbed.paths.shm(&gpu(1))].map(|path| identity(&path));
    let before = inodes();
    supervisor.kill();
    eventually(|| daemons.iter().all(testbed::Process::is_gone), || "the daemons exit".to_owned());
    // One of them is no longer wanted when the next supervisor starts.
    testbed.want(&[1]);
    let _supervisor = testbed.supervisor();
    testbed.status(1, "is ready again", |status| {
        status.state == MpsDaemonState::Ready && status.starts == 2
    });
    eventually(
        || !testbed.paths.daemon(&gpu(2)).exists(),
        || "the old directory is removed".to_owned(),
    );
    assert_eq!(inodes(), before);
    assert_eq!((testbed.mounts(), testbed.processes().len()), (testbed.mounts_of(1), 1));
}

#[test]
fn status_of_killed_supervisor_is_replaced() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let supervisor = testbed.supervisor();
    testbed.want(&[1]);
    testbed.ready(1);
    supervisor.kill();
    assert!(!supervisor_is_running(&testbed.paths).expect("the lock can be tested"));
    let _supervisor = testbed.supervisor_with(|supervisor| {
        supervisor.env("TESSERA_MPS_CONTROL", "no-such-mps-control");
    });
    testbed.status(1, "has failed", |status| {
        status.state == MpsDaemonState::Failed && status.starts >= 2
    });
}

#[test]
fn orphaned_server_is_killed_before_next_start() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    testbed.want(&[1]);
    let supervisor = testbed.supervisor();
    testbed.ready(1);
    // Poses as a server of the daemon.
    let mark = fs::read_to_string(testbed.paths.daemon(&gpu(1)).join("mark")).expect("readable");
    let mut orphan = std::process::Command::new("sleep");
    let mut orphan = orphan.arg("1000").env("TESSERA_MPS_DAEMON", mark).spawn().expect("started");
    supervisor.kill();
    let _supervisor = testbed.supervisor();
    testbed.status(1, "is ready again", |status| {
        status.state == MpsDaemonState::Ready && status.starts == 2
    });
    assert!(!orphan.wait().expect("exited").success());
}

#[test]
fn second_supervisor_waits_for_first_to_exit() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let is_alive = || supervisor_is_running(&testbed.paths).expect("the lock can be tested");
    assert!(!is_alive());
    testbed.want(&[1]);
    let first = testbed.supervisor();
    testbed.ready(1);
    assert!(is_alive());
    assert_eq!(supervisor_pid(&testbed.paths).expect("readable"), Some(first.pid()));
    let _second = testbed.supervisor();
    assert!(first.stop().success());
    testbed.status(1, "is the second's", |status| {
        status.state == MpsDaemonState::Ready && status.starts == 2
    });
    assert!(is_alive());
}

#[test]
fn stopped_supervisor_leaves_no_process() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let supervisor = testbed.supervisor();
    testbed.want(&[1]);
    testbed.ready(1);
    assert!(supervisor.stop().success());
    assert_eq!(testbed.processes(), Vec::<i32>::new());
    assert_eq!(testbed.mounts(), testbed.mounts_of(1));
    let status = MpsDaemonStatus::read(&testbed.paths, &gpu(1)).expect("valid").expect("there");
    assert_eq!(
        (status.state, status.message.as_str()),
        (MpsDaemonState::Failed, "tessera-mps was stopped")
    );
    assert!(!supervisor_is_running(&testbed.paths).expect("the lock can be tested"));
}

#[test]
fn missing_program_error_names_the_flag() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let _supervisor = testbed.supervisor_with(|supervisor| {
        supervisor.env("TESSERA_MPS_CONTROL", "no-such-mps-control");
    });
    testbed.want(&[1]);
    let failed = testbed.status(1, "has failed", |status| status.state == MpsDaemonState::Failed);
    assert!(
        failed
            .message
            .starts_with("cannot execute `no-such-mps-control` in /: check --mps-control"),
        "{failed:?}"
    );
    testbed.want(&[]);
    testbed.gone(1);
}

#[test]
fn failed_daemon_restarts_after_delay_and_shows_log() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let begun = Instant::now();
    let _supervisor = testbed.supervisor_with(|supervisor| {
        supervisor.env("FAKE_MPS_FAIL", "start");
    });
    testbed.want(&[1]);
    let third = testbed.status(1, "is started a third time", |status| status.starts >= 3);
    // The delays before the third start are 1 s and 2 s.
    assert!(begun.elapsed().as_secs() >= 3, "{:?}", begun.elapsed());
    assert_ne!(third.state, MpsDaemonState::Ready);
    for words in [
        "exit status: 1",
        "control.log:",
        "Control",
        "the daemon was configured to fail at its start",
    ] {
        assert!(third.message.contains(words), "{third:?}");
    }
    assert_eq!(testbed.mounts(), testbed.mounts_of(1));
}

#[test]
fn daemon_that_never_answers_is_killed() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let hang = |supervisor: &mut std::process::Command| {
        supervisor.env("FAKE_MPS_FAIL", "hang").args([
            "--start-timeout",
            "1500ms",
            "--stop-timeout",
            "300ms",
        ]);
    };
    let _supervisor = testbed.supervisor_with(hang);
    testbed.want(&[1]);
    let failed = testbed.status(1, "has failed", |status| status.state == MpsDaemonState::Failed);
    let reason = "the daemon did not answer within 1.5s";
    assert!(failed.message.starts_with(reason), "{failed:?}");
    // On a busy machine the daemon may be killed before it has printed anything.
    let again = testbed.status(1, "restarts with its previous output", |status| {
        assert_ne!(status.state, MpsDaemonState::Ready);
        status.state == MpsDaemonState::Starting
            && status.starts >= 2
            && status.message.contains("control.log:")
    });
    assert!(again.message.starts_with(reason), "{again:?}");
    // The daemon does not quit either.
    testbed.want(&[]);
    testbed.gone(1);
}

#[test]
fn unresponsive_daemon_is_killed_and_restarted() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let _supervisor = testbed.supervisor_with(|supervisor| {
        testbed.redirect_log(supervisor.args([
            "--health-interval",
            "50ms",
            "--answer-timeout",
            "1s",
        ]));
    });
    testbed.want(&[1]);
    testbed.ready(1);
    testbed.daemon(1).suspend();
    testbed.status(1, "is ready again", |status| {
        status.state == MpsDaemonState::Ready && status.starts >= 2
    });
    assert!(
        testbed.log().contains("the daemon did not answer several times in a row"),
        "{}",
        testbed.log()
    );
}

#[test]
fn unprivileged_supervisor_reports_required_privilege() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let _supervisor = testbed.supervisor_without_privileges();
    testbed.want(&[1]);
    let failed = testbed.status(1, "has failed", |status| status.state == MpsDaemonState::Failed);
    assert!(failed.message.contains("privileged: true"), "{failed:?}");
    testbed.want(&[]);
    testbed.gone(1);
}

#[test]
fn daemon_runs_in_driver_root_without_other_files() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let root = testbed::driver_root();
    let _supervisor = testbed.supervisor_with(|supervisor| {
        supervisor
            .arg("--driver-root")
            .arg(root.path())
            .env("TESSERA_MPS_CONTROL", testbed::PROGRAM);
    });
    testbed.want(&[1]);
    let status = testbed
        .status(1, "is ready or has failed", |status| status.state != MpsDaemonState::Starting);
    assert_eq!(status.state, MpsDaemonState::Ready, "{status:?}");
    let (daemon, gpu) = (testbed.daemon(1), gpu(1));
    for (path, target) in [
        ("/tmp/nvidia-mps", testbed.paths.pipe(&gpu)),
        ("/tmp/nvidia-log", testbed.paths.log(&gpu)),
        ("/dev/shm", testbed.paths.shm(&gpu)),
    ] {
        assert_eq!(daemon.sees(path), identity(&target), "{path}");
        // A tenant that is root in its container makes a link to a file of the node.
        let (victim, link) = (root.path().join("victim"), target.join("a.link"));
        std::os::unix::fs::symlink(&victim, &link).expect("made");
        let written = fs::write(&link, "x").map_err(|error| error.raw_os_error());
        assert_eq!(written, Err(Some(rustix::io::Errno::LOOP.raw_os_error())), "{path}");
        assert!(!victim.exists());
    }
    let inside = fs::read_link(format!("/proc/{}/root", daemon.0)).expect("a root");
    assert_eq!(inside, root.path());
    assert_eq!(
        fs::read_dir(root.path().join("tmp")).expect("there").count(),
        0,
        "invisible outside the namespace"
    );
    testbed.want(&[]);
    testbed.gone(1);
}

#[test]
fn driver_root_may_be_mounted_after_start() {
    let Some(testbed) = TestBed::new(test_name!()) else { return };
    let (root, parent) = (testbed::driver_root(), tempfile::tempdir().expect("a directory"));
    let target = parent.path().join("driver");
    let _supervisor = testbed.supervisor_with(|supervisor| {
        supervisor.arg("--driver-root").arg(&target).env("TESSERA_MPS_CONTROL", testbed::PROGRAM);
    });
    testbed.want(&[1]);
    let failed = testbed.status(1, "has failed", |status| status.state == MpsDaemonState::Failed);
    assert!(failed.message.contains("--driver-root"), "{failed:?}");
    fs::rename(root.path(), &target).expect("moved");
    testbed.ready(1);
    assert_eq!(testbed.daemon(1).sees("/tmp/nvidia-mps"), identity(&testbed.paths.pipe(&gpu(1))));
}
