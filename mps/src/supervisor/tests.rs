use std::fs;
use std::path::Path;

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

/// Returns paths of the same files by which a status can be read and removed, and not written: the
/// path of the temporary file would exceed `PATH_MAX` (4,096 bytes with the final zero). Holds for
/// root as well, which permissions do not stop.
fn paths_too_long_for_temporary_files(state_dir: &Path) -> MpsPaths {
    const PATH_MAX: usize = 4096;
    let own = MpsPaths::new(state_dir).status(&gpu()).as_os_str().len();
    let padding = PATH_MAX - 2 - own;
    let state_dir = format!("{}{}", state_dir.display(), "/".repeat(padding));
    MpsPaths::new(Path::new(&state_dir))
}

#[test]
fn unwritable_status_is_removed_and_written_later() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut supervisor = supervisor(&directory);
    let paths = supervisor.paths.clone();
    supervisor.daemons.insert(gpu(), DaemonState::down(1));
    let read = || MpsDaemonStatus::read(&paths, &gpu()).expect("whole").map(|status| status.state);
    fs::remove_file(paths.daemons()).expect("there");
    fs::create_dir_all(paths.daemon(&gpu())).expect("made");
    supervisor.publish(&gpu(), MpsDaemonState::Ready, String::new());
    assert_eq!(read(), Some(MpsDaemonState::Ready));
    supervisor.paths = paths_too_long_for_temporary_files(directory.path());
    supervisor.publish(&gpu(), MpsDaemonState::Failed, "exited".to_owned());
    assert_eq!(read(), None);
    supervisor.advance(true);
    assert_eq!(read(), None);
    supervisor.paths = paths.clone();
    supervisor.advance(true);
    assert_eq!(read(), Some(MpsDaemonState::Failed));
}
