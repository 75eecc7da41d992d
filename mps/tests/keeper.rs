//! The keeper as a process, with a stand-in for NVIDIA's program: what it makes of what is wanted,
//! and of daemons that fail.

mod bench;

use std::{fs, os::unix::fs::PermissionsExt, time::Instant};

use bench::{Bench, eventually, gpu, identity};
use tessera_mps_protocol::{State, Status, keeper_is_alive, keeper_pid};
use tessera_test_support::test_name;

#[test]
fn a_gpu_that_is_wanted_gets_a_daemon_with_shared_memory_of_its_own() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let _keeper = bench.keeper();
    bench.want(&[1, 2]);
    for digit in [1, 2] {
        assert_eq!(
            bench.ready(digit),
            Status { state: State::Ready, message: String::new(), starts: 1 }
        );
        let (daemon, gpu) = (bench.daemon(digit), gpu(digit));
        assert_eq!(daemon.sees("/dev/shm"), identity(&bench.paths.shm(&gpu)));
        let mode = |path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        assert_eq!(mode(bench.paths.shm(&gpu)), 0o1777);
        for path in [bench.paths.pipe(&gpu), bench.paths.daemon(&gpu), bench.paths.daemons()] {
            assert_eq!(mode(path), 0o755, "a server may run as anybody");
        }
        assert!(bench.paths.pipe(&gpu).join("control").exists());
    }
    assert_ne!(bench.daemon(1).sees("/dev/shm"), bench.daemon(2).sees("/dev/shm"));
    assert_ne!(
        identity("/dev/shm".as_ref()),
        bench.daemon(1).sees("/dev/shm"),
        "nobody else's has changed"
    );
}

#[test]
fn nothing_is_left_of_a_daemon_that_nobody_wants_and_it_can_be_wanted_again() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let _keeper = bench.keeper();
    for _ in 0..2 {
        bench.want(&[1]);
        assert_eq!(bench.ready(1).starts, 1);
        let daemon = bench.daemon(1);
        bench.want(&[]);
        bench.gone(1);
        assert!(daemon.is_gone());
    }
}

#[test]
fn who_wants_a_daemon_and_then_reads_that_it_is_ready_has_one() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let _keeper = bench.keeper_with(|keeper| {
        keeper.args(["--poll-interval", "1ms"]);
    });
    for looks in 0..25 {
        bench.want(&[]);
        // Nothing comes of these, but it is another moment each time that the keeper is caught at.
        for _ in 0..looks * 5 {
            let _ = Status::read(&bench.paths, &gpu(1));
        }
        bench.want(&[1]);
        bench.ready(1);
        assert!(bench.answers(1), "after {looks} looks");
    }
}

#[test]
fn names_that_are_no_gpus_are_ignored() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    bench.want(&[1]);
    fs::write(bench.paths.wanted().join("README"), "").expect("written");
    let _keeper = bench.keeper();
    bench.ready(1);
    assert_eq!(fs::read_dir(bench.paths.daemons()).expect("there").count(), 1);
}

#[test]
fn a_daemon_that_is_killed_is_started_again_in_place() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let _keeper = bench.keeper_with(|keeper| bench.log_of(keeper));
    bench.want(&[1]);
    bench.ready(1);
    let inodes =
        || [bench.paths.pipe(&gpu(1)), bench.paths.shm(&gpu(1))].map(|path| identity(&path));
    let before = inodes();
    bench.daemon(1).kill();
    bench.status(1, "is ready again", |status| status.state == State::Ready && status.starts == 2);
    // Its status has said so for a second only.
    let log = bench.log();
    assert!(log.contains("SIGKILL") && log.contains("Starting control daemon"), "{log}");
    assert_eq!(inodes(), before, "containers have them");
}

#[test]
fn what_tenants_make_beside_the_pipes_keeps_no_daemon_from_being_started_again_and_removed() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let _keeper = bench.keeper();
    bench.want(&[1]);
    bench.ready(1);
    let pipe = bench.paths.pipe(&gpu(1));
    fs::create_dir_all(pipe.join("x.pid/y")).expect("made");
    assert_eq!(bench::nest(&pipe, 100), 100);
    std::os::unix::fs::symlink("/etc/passwd", pipe.join("link.pid")).expect("made");
    fs::read(pipe.join("link.pid")).expect_err("links lead nowhere");
    bench.daemon(1).kill();
    bench.status(1, "is ready again", |status| status.state == State::Ready && status.starts == 2);
    assert!(pipe.join("x.pid/y").exists() && fs::symlink_metadata(pipe.join("link.pid")).is_err());
    assert!(bench::nest(&pipe, 5000) < 256, "there is an end to it");
    bench.want(&[]);
    bench.gone(1);
}

#[test]
fn who_fills_the_pipes_directory_or_the_logs_fills_nothing_else() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let _keeper = bench.keeper();
    bench.want(&[1]);
    bench.ready(1);
    for (directory, size) in
        [(bench.paths.pipe(&gpu(1)), 1 << 20), (bench.paths.log(&gpu(1)), 16 << 20)]
    {
        let error = fs::write(directory.join("much"), vec![0; size + 1]).expect_err("too much");
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        assert_ne!(
            identity(&directory).0,
            identity(&bench.paths.daemon(&gpu(1))).0,
            "another file system"
        );
    }
    fs::write(bench.paths.daemon(&gpu(1)).join("more"), vec![0; 32 << 20])
        .expect("there is room here");
    bench.want(&[]);
    bench.gone(1);
}

#[test]
fn daemons_die_with_a_keeper_that_is_killed_and_the_next_starts_them_in_place() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let keeper = bench.keeper();
    bench.want(&[1, 2]);
    let (_, _) = (bench.ready(1), bench.ready(2));
    let daemons = [1, 2].map(|digit| bench.daemon(digit));
    let inodes =
        || [bench.paths.pipe(&gpu(1)), bench.paths.shm(&gpu(1))].map(|path| identity(&path));
    let before = inodes();
    keeper.kill();
    eventually(|| daemons.iter().all(bench::Process::is_gone), || "the daemons die".to_owned());
    // One of them is not wanted any more when the next comes.
    bench.want(&[1]);
    let _keeper = bench.keeper();
    bench.status(1, "is ready again", |status| status.state == State::Ready && status.starts == 2);
    eventually(|| !bench.paths.daemon(&gpu(2)).exists(), || "what was left is removed".to_owned());
    assert_eq!(inodes(), before);
    assert_eq!((bench.mounts(), bench.processes().len()), (bench.mounts_of(1), 1));
}

#[test]
fn what_a_killed_keeper_has_said_is_not_said_any_more() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let keeper = bench.keeper();
    bench.want(&[1]);
    bench.ready(1);
    keeper.kill();
    assert!(!keeper_is_alive(&bench.paths).expect("the lock can be looked at"));
    let _keeper = bench.keeper_with(|keeper| {
        keeper.env("TESSERA_MPS_CONTROL", "no-such-mps-control");
    });
    bench.status(1, "has failed", |status| status.state == State::Failed && status.starts >= 2);
}

#[test]
fn what_an_earlier_daemon_has_left_running_is_killed_before_the_next_starts() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    bench.want(&[1]);
    let keeper = bench.keeper();
    bench.ready(1);
    // A server of its.
    let mark = fs::read_to_string(bench.paths.daemon(&gpu(1)).join("mark")).expect("readable");
    let mut remnant = std::process::Command::new("sleep");
    let mut remnant = remnant.arg("1000").env("TESSERA_MPS_DAEMON", mark).spawn().expect("started");
    keeper.kill();
    let _keeper = bench.keeper();
    bench.status(1, "is ready again", |status| status.state == State::Ready && status.starts == 2);
    assert!(!remnant.wait().expect("it has ended").success());
}

#[test]
fn a_keeper_is_alive_while_it_runs_and_a_second_waits_for_its_end() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let is_alive = || keeper_is_alive(&bench.paths).expect("the lock can be looked at");
    assert!(!is_alive());
    bench.want(&[1]);
    let first = bench.keeper();
    bench.ready(1);
    assert!(is_alive());
    assert_eq!(keeper_pid(&bench.paths).expect("readable"), Some(first.pid()));
    let _second = bench.keeper();
    assert!(first.stop().success());
    bench.status(1, "is the second's", |status| status.state == State::Ready && status.starts == 2);
    assert!(is_alive());
}

#[test]
fn a_keeper_that_stops_leaves_directories_and_no_process() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let keeper = bench.keeper();
    bench.want(&[1]);
    bench.ready(1);
    assert!(keeper.stop().success());
    assert_eq!(bench.processes(), Vec::<i32>::new());
    assert_eq!(bench.mounts(), bench.mounts_of(1));
    let status = Status::read(&bench.paths, &gpu(1)).expect("whole").expect("there");
    assert_eq!((status.state, status.message.as_str()), (State::Failed, "the keeper was stopped"));
    assert!(!keeper_is_alive(&bench.paths).expect("the lock can be looked at"));
}

#[test]
fn a_program_that_is_missing_is_named_with_the_flag_that_names_it() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let _keeper = bench.keeper_with(|keeper| {
        keeper.env("TESSERA_MPS_CONTROL", "no-such-mps-control");
    });
    bench.want(&[1]);
    let failed = bench.status(1, "has failed", |status| status.state == State::Failed);
    assert!(
        failed.message.starts_with("`no-such-mps-control` cannot be run in /: --mps-control names"),
        "{failed:?}"
    );
    bench.want(&[]);
    bench.gone(1);
}

#[test]
fn a_daemon_that_fails_is_tried_again_after_a_while_and_its_log_is_shown() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let begun = Instant::now();
    let _keeper = bench.keeper_with(|keeper| {
        keeper.env("FAKE_MPS_FAIL", "start");
    });
    bench.want(&[1]);
    let third = bench.status(1, "is tried a third time", |status| status.starts >= 3);
    // 1 s and 2 s before the third.
    assert!(begun.elapsed().as_secs() >= 3, "{:?}", begun.elapsed());
    assert_ne!(third.state, State::Ready);
    for words in
        ["exit status: 1", "control.log:", "Control", "the daemon was told to fail at its start"]
    {
        assert!(third.message.contains(words), "{third:?}");
    }
    assert_eq!(bench.mounts(), bench.mounts_of(1));
}

#[test]
fn a_daemon_that_never_answers_is_killed_and_never_ready() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let hang = |keeper: &mut std::process::Command| {
        keeper.env("FAKE_MPS_FAIL", "hang").args([
            "--start-timeout",
            "1500ms",
            "--stop-timeout",
            "300ms",
        ]);
    };
    let _keeper = bench.keeper_with(hang);
    bench.want(&[1]);
    let failed = bench.status(1, "has failed", |status| status.state == State::Failed);
    let reason = "the daemon did not answer within 1.5s";
    assert!(failed.message.starts_with(reason), "{failed:?}");
    // On a busy machine it may be killed before it has said anything.
    let again = bench.status(1, "starts again, with what it said before", |status| {
        assert_ne!(status.state, State::Ready);
        status.state == State::Starting
            && status.starts >= 2
            && status.message.contains("control.log:")
    });
    assert!(again.message.starts_with(reason), "{again:?}");
    // It does not quit either.
    bench.want(&[]);
    bench.gone(1);
}

#[test]
fn a_daemon_that_does_not_answer_any_more_is_killed_and_started_again() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let _keeper = bench.keeper_with(|keeper| {
        bench.log_of(keeper.args(["--health-interval", "50ms", "--answer-timeout", "1s"]));
    });
    bench.want(&[1]);
    bench.ready(1);
    bench.daemon(1).suspend();
    bench.status(1, "is ready again", |status| status.state == State::Ready && status.starts >= 2);
    assert!(
        bench.log().contains("the daemon did not answer several times in a row"),
        "{}",
        bench.log()
    );
}

#[test]
fn a_keeper_that_may_not_mount_says_what_it_needs() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let _keeper = bench.keeper_without_privileges();
    bench.want(&[1]);
    let failed = bench.status(1, "has failed", |status| status.state == State::Failed);
    assert!(failed.message.contains("privileged: true"), "{failed:?}");
    bench.want(&[]);
    bench.gone(1);
}

#[test]
fn daemons_run_in_a_driver_root_that_has_nothing_of_the_keepers() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let root = bench::driver_root();
    let _keeper = bench.keeper_with(|keeper| {
        keeper.arg("--driver-root").arg(root.path()).env("TESSERA_MPS_CONTROL", bench::PROGRAM);
    });
    bench.want(&[1]);
    let status =
        bench.status(1, "is ready or has failed", |status| status.state != State::Starting);
    assert_eq!(status.state, State::Ready, "{status:?}");
    let (daemon, gpu) = (bench.daemon(1), gpu(1));
    for (path, target) in [
        ("/tmp/nvidia-mps", bench.paths.pipe(&gpu)),
        ("/tmp/nvidia-log", bench.paths.log(&gpu)),
        ("/dev/shm", bench.paths.shm(&gpu)),
    ] {
        assert_eq!(daemon.sees(path), identity(&target), "{path}");
    }
    let inside = fs::read_link(format!("/proc/{}/root", daemon.0)).expect("a root");
    assert_eq!(inside, root.path());
    assert_eq!(
        fs::read_dir(root.path().join("tmp")).expect("there").count(),
        0,
        "nobody else sees it"
    );
    bench.want(&[]);
    bench.gone(1);
}

#[test]
fn a_driver_root_that_comes_after_the_keeper_is_as_good() {
    let Some(bench) = Bench::set_up(test_name!()) else { return };
    let (root, place) = (bench::driver_root(), tempfile::tempdir().expect("a directory"));
    let target = place.path().join("driver");
    let _keeper = bench.keeper_with(|keeper| {
        keeper.arg("--driver-root").arg(&target).env("TESSERA_MPS_CONTROL", bench::PROGRAM);
    });
    bench.want(&[1]);
    let failed = bench.status(1, "has failed", |status| status.state == State::Failed);
    assert!(failed.message.contains("--driver-root"), "{failed:?}");
    fs::rename(root.path(), &target).expect("moved");
    bench.ready(1);
    assert_eq!(bench.daemon(1).sees("/tmp/nvidia-mps"), identity(&bench.paths.pipe(&gpu(1))));
}
