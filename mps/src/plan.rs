//! What to do next: a function of what is wanted, how the daemons are, and the time.
//!
//! ```text
//!            Start                first answer
//!  (none) ----------> Starting ----------------> Ready
//!    ^         ^         |  |                    |  |
//!    |         |         |  +--- Kill: silent ---+  |
//!    |         |   ends  v             |            |
//!    |       Down <----------- Killed <+            |
//!    |         |                  ^                 | Quit: not wanted, or the keeper stops
//!    | Remove  | not wanted       | too slow        v
//!    +------ Doomed <----------------------------- Quitting
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use tessera_api::names::GpuUuid;

/// Questions in a row that a daemon may leave unanswered.
const SILENCES: u32 = 3;

/// What is wanted of all daemons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// That they run for these GPUs, and nothing be left of others.
    Run(BTreeSet<GpuUuid>),
    /// That none runs, because the keeper ends.
    Stop,
}

/// What a daemon is after it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Started again.
    Restart,
    /// Removed with all that is its.
    Remove,
    /// Left for the next keeper to start.
    Leave,
}

/// How a daemon is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// There is a directory and no daemon, until then.
    Down {
        /// When it may be started.
        until: Instant,
    },
    /// It has ended because nobody wanted it; its directory is to go, even if somebody wants it
    /// again.
    Doomed {
        /// When it may be tried to remove it.
        until: Instant,
    },
    /// It has not answered yet.
    Starting {
        /// When it has taken too long.
        kill_at: Instant,
        /// When to ask next; `None` while a question is open.
        ask_at: Option<Instant>,
    },
    /// It has answered.
    Ready {
        /// When to ask next; `None` while a question is open.
        ask_at: Option<Instant>,
        /// Questions in a row that it has not answered.
        silences: u32,
    },
    /// It was told to quit.
    Quitting {
        /// When it has taken too long.
        kill_at: Instant,
        /// What comes after.
        then: Then,
    },
    /// It was killed, and has not ended yet.
    Killed {
        /// What comes after.
        then: Then,
    },
}

/// Why a daemon is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It has never answered.
    NeverAnswered,
    /// It does not answer any more.
    Silent,
    /// It does not quit.
    DoesNotQuit,
}

/// What to do with a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Start it.
    Start,
    /// Ask whether it answers.
    Ask,
    /// Tell it to quit.
    Quit(Then),
    /// Kill it.
    Kill(Why, Then),
    /// Remove all that is its.
    Remove,
}

/// What to do with the daemon of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Run,
    Go,
    Stay,
}

impl Wish {
    fn of(&self, gpu: &GpuUuid) -> Fate {
        match self {
            Self::Run(wanted) if wanted.contains(gpu) => Fate::Run,
            Self::Run(_) => Fate::Go,
            Self::Stop => Fate::Stay,
        }
    }

    fn wanted(&self) -> impl Iterator<Item = &GpuUuid> {
        let wanted = if let Self::Run(wanted) = self { Some(wanted) } else { None };
        wanted.into_iter().flatten()
    }
}

impl Phase {
    /// Whether a process may be there.
    #[must_use]
    pub fn is_running(self) -> bool {
        !matches!(self, Self::Down { .. } | Self::Doomed { .. })
    }
}

/// What to do now; at most one thing for each GPU.
#[must_use]
pub fn plan(now: Instant, wish: &Wish, phases: &BTreeMap<GpuUuid, Phase>) -> Vec<(GpuUuid, Step)> {
    let new = wish
        .wanted()
        .filter(|gpu| !phases.contains_key(*gpu))
        .map(|gpu| (gpu.clone(), Step::Start));
    let known = phases
        .iter()
        .filter_map(|(gpu, phase)| Some((gpu.clone(), step(now, wish.of(gpu), *phase)?)));
    known.chain(new).collect()
}

fn step(now: Instant, fate: Fate, phase: Phase) -> Option<Step> {
    let is_due = |at: Instant| at <= now;
    match (phase, fate) {
        (Phase::Down { .. } | Phase::Doomed { .. }, Fate::Stay) | (Phase::Killed { .. }, _) => None,
        (Phase::Down { until }, Fate::Run) => is_due(until).then_some(Step::Start),
        (Phase::Down { .. }, Fate::Go) => Some(Step::Remove),
        (Phase::Doomed { until }, Fate::Run | Fate::Go) => is_due(until).then_some(Step::Remove),
        (Phase::Starting { .. } | Phase::Ready { .. }, Fate::Go) => Some(Step::Quit(Then::Remove)),
        (Phase::Starting { .. } | Phase::Ready { .. }, Fate::Stay) => Some(Step::Quit(Then::Leave)),
        (Phase::Starting { kill_at, .. }, Fate::Run) if is_due(kill_at) => {
            Some(Step::Kill(Why::NeverAnswered, Then::Restart))
        }
        (Phase::Ready { silences: SILENCES.., .. }, Fate::Run) => {
            Some(Step::Kill(Why::Silent, Then::Restart))
        }
        (Phase::Starting { ask_at, .. } | Phase::Ready { ask_at, .. }, Fate::Run) => {
            ask_at.is_some_and(is_due).then_some(Step::Ask)
        }
        (Phase::Quitting { kill_at, then }, _) => {
            is_due(kill_at).then_some(Step::Kill(Why::DoesNotQuit, then))
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

    fn run(gpus: &[u8]) -> Wish {
        Wish::Run(gpus.iter().copied().map(gpu).collect())
    }

    /// What is done with the one daemon there is.
    fn next(now: Instant, wish: &Wish, phase: Phase) -> Option<Step> {
        let steps = plan(now, wish, &BTreeMap::from([(gpu(1), phase)]));
        assert!(steps.len() <= 1 && steps.iter().all(|(of, _)| *of == gpu(1)), "{steps:?}");
        steps.first().map(|(_, step)| *step)
    }

    /// A time, and one shortly after it.
    fn times() -> (Instant, Instant) {
        let now = Instant::now();
        (now, now + Duration::from_millis(1))
    }

    #[test]
    fn a_gpu_that_is_wanted_gets_a_daemon_and_one_that_is_not_loses_what_was_left() {
        let (now, later) = times();
        let phases = BTreeMap::from([(gpu(2), Phase::Down { until: later })]);
        assert_eq!(plan(now, &run(&[1]), &phases), [(gpu(2), Step::Remove), (gpu(1), Step::Start)]);
    }

    #[test]
    fn one_that_ended_is_started_again_when_its_time_has_come() {
        let (now, later) = times();
        let down = Phase::Down { until: later };
        assert_eq!([now, later].map(|at| next(at, &run(&[1]), down)), [None, Some(Step::Start)]);
    }

    #[test]
    fn one_that_starts_is_asked_until_it_has_taken_too_long() {
        let (now, later) = times();
        let starting = |ask_at| Phase::Starting { kill_at: later, ask_at };
        assert_eq!(next(now, &run(&[1]), starting(Some(now))), Some(Step::Ask));
        assert_eq!(next(now, &run(&[1]), starting(Some(later))), None);
        assert_eq!(next(now, &run(&[1]), starting(None)), None, "a question is open");
        let killed = Some(Step::Kill(Why::NeverAnswered, Then::Restart));
        assert_eq!(next(later, &run(&[1]), starting(Some(now))), killed);
    }

    #[test]
    fn one_that_is_ready_is_killed_after_three_silences() {
        let (now, _) = times();
        let ready = |silences| Phase::Ready { ask_at: Some(now), silences };
        assert_eq!(next(now, &run(&[1]), ready(2)), Some(Step::Ask));
        assert_eq!(next(now, &run(&[1]), ready(3)), Some(Step::Kill(Why::Silent, Then::Restart)));
    }

    #[test]
    fn one_that_nobody_wants_is_told_to_quit_then_killed_then_removed() {
        let (now, later) = times();
        for running in [
            Phase::Starting { kill_at: now, ask_at: Some(now) },
            Phase::Ready { ask_at: Some(now), silences: 3 },
        ] {
            assert_eq!(next(now, &run(&[]), running), Some(Step::Quit(Then::Remove)));
        }
        let quitting = Phase::Quitting { kill_at: later, then: Then::Remove };
        let killed = Some(Step::Kill(Why::DoesNotQuit, Then::Remove));
        assert_eq!([now, later].map(|at| next(at, &run(&[]), quitting)), [None, killed]);
        assert_eq!(next(later, &run(&[]), Phase::Killed { then: Then::Remove }), None);
        assert_eq!(next(now, &run(&[]), Phase::Doomed { until: now }), Some(Step::Remove));
    }

    #[test]
    fn one_that_is_wanted_again_too_late_is_removed_first() {
        let (now, later) = times();
        let quitting = Phase::Quitting { kill_at: later, then: Then::Remove };
        assert_eq!(next(now, &run(&[1]), quitting), None);
        assert_eq!(next(now, &run(&[1]), Phase::Doomed { until: now }), Some(Step::Remove));
    }

    #[test]
    fn a_keeper_that_stops_has_daemons_quit_and_leaves_directories_and_starts_nothing() {
        let (now, _) = times();
        assert_eq!(plan(now, &Wish::Stop, &BTreeMap::new()), []);
        let ready = Phase::Ready { ask_at: Some(now), silences: 0 };
        assert_eq!(next(now, &Wish::Stop, ready), Some(Step::Quit(Then::Leave)));
        for down in [Phase::Down { until: now }, Phase::Doomed { until: now }] {
            assert_eq!((next(now, &Wish::Stop, down), down.is_running()), (None, false));
        }
    }
}
