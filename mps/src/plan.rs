//! Next steps of the supervisor, as a pure function of the desired state, the daemons' phases and
//! the time.
//!
//! ```text
//!            Start                first answer
//!  (none) ----------> Starting ----------------> Ready
//!    ^         ^         |  |                    |  |
//!    |         |         |  +--- Unresponsive ---+  |
//!    |         |   exits  v             |            |
//!    |       Down <----------- Killed <+            |
//!    |         |                  ^                 | Quit: not wanted, or shutdown
//!    | Remove  | not wanted       | timeout         v
//!    +------ Removing <----------------------------- Quitting
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use tessera_api::names::GpuUuid;

/// Consecutive health checks that a daemon may leave unanswered.
const MAX_MISSED_HEALTH_CHECKS: u32 = 3;

/// Desired state of all daemons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DesiredState {
    /// Daemons run for these GPUs, and the directories of other GPUs are removed.
    Run(BTreeSet<GpuUuid>),
    /// No daemon runs, because the supervisor stops.
    Stop,
}

/// Action after a daemon has exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterExit {
    /// The daemon is restarted.
    Restart,
    /// The daemon's directory is removed.
    Remove,
    /// The directory stays for the next supervisor.
    Keep,
}

/// Lifecycle phase of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The directory exists and no daemon runs.
    Down {
        /// Earliest time of the next start.
        start_at: Instant,
    },
    /// The daemon exited because no claim used it. Its directory is removed first, even if the GPU
    /// is wanted again.
    Removing {
        /// Earliest time of the next attempt to remove the directory.
        retry_at: Instant,
    },
    /// The daemon was started and has not answered yet.
    Starting {
        /// Time at which the start has timed out.
        kill_at: Instant,
        /// Time of the next health check; `None` while one is running.
        check_at: Option<Instant>,
    },
    /// The daemon has answered.
    Ready {
        /// Time of the next health check; `None` while one is running.
        check_at: Option<Instant>,
        /// Consecutive unanswered health checks.
        missed_checks: u32,
    },
    /// The daemon was sent `quit`.
    Quitting {
        /// Time at which the exit has timed out.
        kill_at: Instant,
        /// Action after the exit.
        after: AfterExit,
    },
    /// The daemon was killed and has not exited yet.
    Killed {
        /// Action after the exit.
        after: AfterExit,
    },
}

/// Reason to kill a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillReason {
    /// The daemon never answered.
    StartTimeout,
    /// The daemon stopped answering.
    Unresponsive,
    /// The daemon did not exit after `quit`.
    StopTimeout,
}

/// Next step for a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DaemonStep {
    /// Start the daemon.
    Start,
    /// Send a health check.
    CheckHealth,
    /// Send `quit`.
    Quit(AfterExit),
    /// Kill the daemon.
    Kill(KillReason, AfterExit),
    /// Remove the daemon's directory.
    Remove,
}

/// Desired action for the daemon of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DaemonAction {
    Run,
    Remove,
    Stop,
}

impl DesiredState {
    fn action(&self, gpu: &GpuUuid) -> DaemonAction {
        match self {
            Self::Run(wanted) if wanted.contains(gpu) => DaemonAction::Run,
            Self::Run(_) => DaemonAction::Remove,
            Self::Stop => DaemonAction::Stop,
        }
    }

    fn wanted(&self) -> impl Iterator<Item = &GpuUuid> {
        let wanted = if let Self::Run(wanted) = self { Some(wanted) } else { None };
        wanted.into_iter().flatten()
    }
}

impl Phase {
    /// Returns true if a daemon process may exist.
    #[must_use]
    pub fn is_running(self) -> bool {
        !matches!(self, Self::Down { .. } | Self::Removing { .. })
    }
}

/// Returns the steps that are due, at most one per GPU.
#[must_use]
pub fn plan(
    now: Instant,
    desired: &DesiredState,
    phases: &BTreeMap<GpuUuid, Phase>,
) -> Vec<(GpuUuid, DaemonStep)> {
    let new = desired
        .wanted()
        .filter(|gpu| !phases.contains_key(*gpu))
        .map(|gpu| (gpu.clone(), DaemonStep::Start));
    let known = phases
        .iter()
        .filter_map(|(gpu, phase)| Some((gpu.clone(), step(now, desired.action(gpu), *phase)?)));
    known.chain(new).collect()
}

fn step(now: Instant, action: DaemonAction, phase: Phase) -> Option<DaemonStep> {
    let is_due = |at: Instant| at <= now;
    match (phase, action) {
        (Phase::Down { .. } | Phase::Removing { .. }, DaemonAction::Stop)
        | (Phase::Killed { .. }, _) => None,
        (Phase::Down { start_at }, DaemonAction::Run) => {
            is_due(start_at).then_some(DaemonStep::Start)
        }
        (Phase::Down { .. }, DaemonAction::Remove) => Some(DaemonStep::Remove),
        (Phase::Removing { retry_at }, DaemonAction::Run | DaemonAction::Remove) => {
            is_due(retry_at).then_some(DaemonStep::Remove)
        }
        (Phase::Starting { .. } | Phase::Ready { .. }, DaemonAction::Remove) => {
            Some(DaemonStep::Quit(AfterExit::Remove))
        }
        (Phase::Starting { .. } | Phase::Ready { .. }, DaemonAction::Stop) => {
            Some(DaemonStep::Quit(AfterExit::Keep))
        }
        (Phase::Starting { kill_at, .. }, DaemonAction::Run) if is_due(kill_at) => {
            Some(DaemonStep::Kill(KillReason::StartTimeout, AfterExit::Restart))
        }
        (Phase::Ready { missed_checks: MAX_MISSED_HEALTH_CHECKS.., .. }, DaemonAction::Run) => {
            Some(DaemonStep::Kill(KillReason::Unresponsive, AfterExit::Restart))
        }
        (Phase::Starting { check_at, .. } | Phase::Ready { check_at, .. }, DaemonAction::Run) => {
            check_at.is_some_and(is_due).then_some(DaemonStep::CheckHealth)
        }
        (Phase::Quitting { kill_at, after }, _) => {
            is_due(kill_at).then_some(DaemonStep::Kill(KillReason::StopTimeout, after))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn gpu(digit: u8) -> GpuUuid {
        GpuUuid::new(format!("GPU-{digit}f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77")).expect("a UUID")
    }

    fn run(gpus: &[u8]) -> DesiredState {
        DesiredState::Run(gpus.iter().copied().map(gpu).collect())
    }

    /// Returns the step for a single daemon.
    fn next(now: Instant, desired: &DesiredState, phase: Phase) -> Option<DaemonStep> {
        let steps = plan(now, desired, &BTreeMap::from([(gpu(1), phase)]));
        assert!(steps.len() <= 1 && steps.iter().all(|(of, _)| *of == gpu(1)), "{steps:?}");
        steps.first().map(|(_, step)| *step)
    }

    /// Returns a time and one shortly after it.
    fn times() -> (Instant, Instant) {
        let now = Instant::now();
        (now, now + Duration::from_millis(1))
    }

    #[test]
    fn starts_wanted_daemon_and_removes_unwanted_directory() {
        let (now, later) = times();
        let phases = BTreeMap::from([(gpu(2), Phase::Down { start_at: later })]);
        assert_eq!(
            plan(now, &run(&[1]), &phases),
            [(gpu(2), DaemonStep::Remove), (gpu(1), DaemonStep::Start)]
        );
    }

    #[test]
    fn exited_daemon_restarts_after_delay() {
        let (now, later) = times();
        let down = Phase::Down { start_at: later };
        assert_eq!(
            [now, later].map(|at| next(at, &run(&[1]), down)),
            [None, Some(DaemonStep::Start)]
        );
    }

    #[test]
    fn starting_daemon_is_checked_until_timeout() {
        let (now, later) = times();
        let starting = |check_at| Phase::Starting { kill_at: later, check_at };
        assert_eq!(next(now, &run(&[1]), starting(Some(now))), Some(DaemonStep::CheckHealth));
        assert_eq!(next(now, &run(&[1]), starting(Some(later))), None);
        assert_eq!(next(now, &run(&[1]), starting(None)), None, "a check is running");
        let killed = Some(DaemonStep::Kill(KillReason::StartTimeout, AfterExit::Restart));
        assert_eq!(next(later, &run(&[1]), starting(Some(now))), killed);
    }

    #[test]
    fn ready_daemon_is_killed_after_three_missed_checks() {
        let (now, _) = times();
        let ready = |missed_checks| Phase::Ready { check_at: Some(now), missed_checks };
        assert_eq!(next(now, &run(&[1]), ready(2)), Some(DaemonStep::CheckHealth));
        assert_eq!(
            next(now, &run(&[1]), ready(3)),
            Some(DaemonStep::Kill(KillReason::Unresponsive, AfterExit::Restart))
        );
    }

    #[test]
    fn unwanted_daemon_quits_is_killed_then_removed() {
        let (now, later) = times();
        for running in [
            Phase::Starting { kill_at: now, check_at: Some(now) },
            Phase::Ready { check_at: Some(now), missed_checks: 3 },
        ] {
            assert_eq!(next(now, &run(&[]), running), Some(DaemonStep::Quit(AfterExit::Remove)));
        }
        let quitting = Phase::Quitting { kill_at: later, after: AfterExit::Remove };
        let killed = Some(DaemonStep::Kill(KillReason::StopTimeout, AfterExit::Remove));
        assert_eq!([now, later].map(|at| next(at, &run(&[]), quitting)), [None, killed]);
        assert_eq!(next(later, &run(&[]), Phase::Killed { after: AfterExit::Remove }), None);
        assert_eq!(
            next(now, &run(&[]), Phase::Removing { retry_at: now }),
            Some(DaemonStep::Remove)
        );
    }

    #[test]
    fn quitting_daemon_is_removed_before_restart() {
        let (now, later) = times();
        let quitting = Phase::Quitting { kill_at: later, after: AfterExit::Remove };
        assert_eq!(next(now, &run(&[1]), quitting), None);
        assert_eq!(
            next(now, &run(&[1]), Phase::Removing { retry_at: now }),
            Some(DaemonStep::Remove)
        );
    }

    #[test]
    fn shutdown_quits_daemons_and_keeps_directories() {
        let (now, _) = times();
        assert_eq!(plan(now, &DesiredState::Stop, &BTreeMap::new()), []);
        let ready = Phase::Ready { check_at: Some(now), missed_checks: 0 };
        assert_eq!(next(now, &DesiredState::Stop, ready), Some(DaemonStep::Quit(AfterExit::Keep)));
        for down in [Phase::Down { start_at: now }, Phase::Removing { retry_at: now }] {
            assert_eq!((next(now, &DesiredState::Stop, down), down.is_running()), (None, false));
        }
    }
}
