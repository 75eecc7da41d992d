use std::fs;

use super::*;

fn gpu() -> GpuUuid {
    GpuUuid::new("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID")
}

/// Returns a supervisor that cannot start daemons, because it cannot create directories.
fn supervisor(directory: &tempfile::TempDir) -> MpsSupervisor {
    let settings = SupervisorSettings {
        state_dir: directory.path().to_owned(),
        driver_root: "/".into(),
        mps_control: "true".into(),
        multi_user: true,
        shm_size: ShmSize::default(),
        poll_interval: Duration::from_secs(1),
        health_interval: Duration::from_secs(1),
        answer_timeout: Duration::from_secs(1),
        start_timeout: Duration::from_secs(1),
        stop_timeout: Duration::from_secs(1),
    };
    let paths = MpsPaths::new(directory.path());
    fs::create_dir_all(paths.root()).expect("made");
    let supervisor = MpsSupervisor::new(settings, paths.clone(), mpsc::unbounded_channel().0)
        .expect("no directories");
    fs::write(paths.daemons(), "").expect("written");
    supervisor
}

#[test]
fn answer_of_removed_daemon_is_ignored() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut supervisor = supervisor(&directory);
    let answer =
        |start| DaemonEvent { gpu: gpu(), start, kind: DaemonEventKind::HealthChecked(Ok(())) };
    let mut begin = || {
        supervisor.daemons.remove(&gpu());
        supervisor.start(&gpu());
        let daemon = supervisor.daemons.get_mut(&gpu()).expect("known");
        daemon.phase = Phase::Starting { kill_at: Instant::now(), check_at: None };
        daemon.start
    };
    let [first, second] = [begin(), begin()];
    supervisor.handle(answer(first));
    assert!(matches!(supervisor.daemons[&gpu()].phase, Phase::Starting { .. }), "stale answer");
    supervisor.handle(answer(second));
    assert!(matches!(supervisor.daemons[&gpu()].phase, Phase::Ready { .. }));
}

#[test]
fn restart_delay_doubles_with_each_failure() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut supervisor = supervisor(&directory);
    supervisor.daemons.insert(gpu(), DaemonState::down(0));
    for seconds in [1, 2, 4] {
        let before = Instant::now();
        supervisor.record_failure(&gpu(), "no GPU".to_owned());
        let Phase::Down { start_at } = supervisor.daemons[&gpu()].phase else {
            panic!("the daemon is not running")
        };
        assert!(start_at >= before + Duration::from_secs(seconds));
    }
}

#[test]
fn unwritable_status_is_removed_and_written_later() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut supervisor = supervisor(&directory);
    let paths = supervisor.paths.clone();
    supervisor.daemons.insert(gpu(), DaemonState::down(1));
    let read = || Status::read(&paths, &gpu()).expect("whole").map(|status| status.state);
    fs::remove_file(paths.daemons()).expect("there");
    fs::create_dir_all(paths.daemon(&gpu())).expect("made");
    supervisor.publish(&gpu(), State::Ready, String::new());
    assert_eq!(read(), Some(State::Ready));
    let blocker = paths.daemon(&gpu()).join("status.new");
    fs::create_dir(&blocker).expect("made");
    supervisor.publish(&gpu(), State::Failed, "exited".to_owned());
    assert_eq!(read(), None);
    supervisor.advance(true);
    assert_eq!(read(), None);
    fs::remove_dir(&blocker).expect("there");
    supervisor.advance(true);
    assert_eq!(read(), Some(State::Failed));
}
