//! Injects the faults of a plan into an API server and counts them.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::plan::{Episode, EpisodeKind, FaultKind, FaultPlan};
use crate::api::{ApiError, ApiServer, Fault, RequestInfo, WatchCache, WatchFault};

/// Number of faults by kind.
pub type FaultCounts = BTreeMap<FaultKind, u64>;

/// Prefix of the users whose requests and watches are affected: the tested programs. Outages affect
/// all users.
const TARGET_USERS: &str = "system:serviceaccount:tessera-system:";

/// A fault plan bound to an API server.
pub struct Injector {
    api: ApiServer,
    plan: FaultPlan,
    /// Files that set the clocks of programs, see `testing/fake/clock`.
    clocks: Vec<PathBuf>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    running: Vec<EpisodeKind>,
    /// Number of draws in each stream.
    streams: HashMap<String, u64>,
    counts: FaultCounts,
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Injector {
    /// Creates an injector and installs its hooks. Nothing happens before [`Self::run`].
    pub fn new(api: ApiServer, plan: FaultPlan, clocks: Vec<PathBuf>) -> Self {
        let state: Arc<Mutex<State>> = Arc::default();
        let (requests, events) = (state.clone(), state.clone());
        let (request_plan, event_plan) = (plan.clone(), plan.clone());
        api.set_fault_hook(Some(Arc::new(move |request| {
            locked(&requests).decide(&request_plan, request)
        })));
        api.set_watch_fault_hook(Some(Arc::new(move |watch| {
            locked(&events).decide_event(&event_plan, watch)
        })));
        Self { api, plan, clocks, state }
    }

    /// Runs the plan. Afterwards the server behaves normally again.
    ///
    /// # Errors
    /// Returns an error if a clock cannot be set.
    pub async fn run(self) -> std::io::Result<FaultCounts> {
        let start = Instant::now();
        let resumptions = self.api.expired_resumptions();
        let moments = moments(&self.plan.episodes);
        for (at, starts, kind) in moments {
            tokio::time::sleep_until(start + at).await;
            tracing::info!(seed = self.plan.seed, ?kind, starts, "fault episode");
            if starts { self.begin(kind)? } else { self.end(kind)? }
        }
        self.api.set_fault_hook(None);
        self.api.set_watch_fault_hook(None);
        let mut counts = std::mem::take(&mut locked(&self.state).counts);
        counts.insert(FaultKind::ExpiredResumption, self.api.expired_resumptions() - resumptions);
        Ok(counts)
    }

    fn begin(&self, kind: &EpisodeKind) -> std::io::Result<()> {
        match *kind {
            EpisodeKind::Outage { .. } => {
                self.api.simulate_crash();
                locked(&self.state).count(FaultKind::Restart);
            }
            EpisodeKind::WatchCacheLoss => {
                self.api.reset_watch_cache();
                self.api.close_watches();
            }
            EpisodeKind::ServerClock { ahead } => {
                self.api.set_clock_ahead(ahead);
                locked(&self.state).count(FaultKind::ServerClock);
            }
            EpisodeKind::ProgramClock { program, ahead } => {
                self.set_clock(program, ahead)?;
                locked(&self.state).count(FaultKind::ProgramClock);
            }
            EpisodeKind::EventDelay { .. }
            | EpisodeKind::WriteConflicts { .. }
            | EpisodeKind::Failures { .. } => {
                locked(&self.state).running.push(kind.clone());
            }
        }
        Ok(())
    }

    fn end(&self, kind: &EpisodeKind) -> std::io::Result<()> {
        match *kind {
            EpisodeKind::Outage { keeps_cache } => {
                self.api.restart_after_crash(if keeps_cache {
                    WatchCache::Kept
                } else {
                    WatchCache::Fresh
                });
            }
            EpisodeKind::WatchCacheLoss => {}
            EpisodeKind::ServerClock { .. } => self.api.set_clock_ahead(0),
            EpisodeKind::ProgramClock { program, .. } => self.set_clock(program, 0)?,
            EpisodeKind::EventDelay { .. }
            | EpisodeKind::WriteConflicts { .. }
            | EpisodeKind::Failures { .. } => {
                let mut state = locked(&self.state);
                if let Some(index) = state.running.iter().position(|running| running == kind) {
                    state.running.remove(index);
                }
            }
        }
        Ok(())
    }

    fn set_clock(&self, program: usize, ahead: i64) -> std::io::Result<()> {
        let Some(path) = self.clocks.get(program % self.clocks.len().max(1)) else { return Ok(()) };
        // The file is written in index, since the program has it mapped.
        std::fs::File::options().write(true).open(path)?.write_all_at(&ahead.to_ne_bytes(), 0)
    }
}

/// Returns the starts and ends of the episodes, in order of time.
fn moments(episodes: &[Episode]) -> Vec<(Duration, bool, &EpisodeKind)> {
    let starts = episodes.iter().map(|episode| (episode.start, true, &episode.kind));
    let ends =
        episodes.iter().map(|episode| (episode.start + episode.duration, false, &episode.kind));
    let mut moments: Vec<_> = starts.chain(ends).collect();
    moments.sort_by_key(|(at, ..)| *at);
    moments
}

impl State {
    fn count(&mut self, kind: FaultKind) {
        *self.counts.entry(kind).or_default() += 1;
    }

    /// Returns the next draw of a stream.
    fn draw(&mut self, plan: &FaultPlan, stream: String) -> (u64, u64) {
        let number = self.streams.entry(stream.clone()).or_default();
        *number += 1;
        (*number, plan.draw(&stream, *number))
    }

    fn decide(&mut self, plan: &FaultPlan, request: &RequestInfo) -> Fault {
        if !request.user.name.starts_with(TARGET_USERS) || self.running.is_empty() {
            return Fault::None;
        }
        let is_write = matches!(request.verb, "create" | "update" | "patch" | "delete");
        let (number, draw) =
            self.draw(plan, format!("{} {} {}", request.user.name, request.verb, request.resource));
        let conflicts = self.running.iter().filter_map(|kind| match kind {
            EpisodeKind::WriteConflicts { resource, every } => Some((*resource, *every)),
            _ => None,
        });
        let has_conflict =
            conflicts.into_iter().any(|(of, every)| of == request.resource && number % every == 0);
        let is_update = matches!(request.verb, "update" | "patch");
        if is_update && has_conflict {
            self.count(match request.resource {
                "leases" => FaultKind::ConflictOnLease,
                "resourceslices" => FaultKind::ConflictOnSlice,
                _ => FaultKind::ConflictOnClaim,
            });
            return Fault::ConflictingWrite;
        }
        match self.failure_interval() {
            // A lease that is not renewed ends the leader, so only some of its renewals fail.
            Some(every) if draw % every == 0 && is_write => {
                let error = refusal(draw / every);
                let kind = self.less_frequent(FaultKind::DroppedResponse, FaultKind::Refusal);
                self.count(kind);
                if kind == FaultKind::DroppedResponse {
                    Fault::DropResponse(error)
                } else {
                    Fault::Refuse(error)
                }
            }
            _ => Fault::None,
        }
    }

    fn decide_event(&mut self, plan: &FaultPlan, watch: &RequestInfo) -> WatchFault {
        if !watch.user.name.starts_with(TARGET_USERS) || self.running.is_empty() {
            return WatchFault::None;
        }
        let (_, draw) =
            self.draw(plan, format!("{} events of {}", watch.user.name, watch.resource));
        if let Some(every) = self.failure_interval()
            && draw % (2 * every) == 0
        {
            let kind = self.less_frequent(FaultKind::ExpiredWatch, FaultKind::BrokenWatch);
            self.count(kind);
            return if kind == FaultKind::ExpiredWatch {
                WatchFault::Expire
            } else {
                WatchFault::Break
            };
        }
        let delay = self.running.iter().find_map(|kind| match kind {
            EpisodeKind::EventDelay { resource, max_delay } if *resource == watch.resource => {
                Some(*max_delay)
            }
            _ => None,
        });
        let Some(max_delay) = delay else { return WatchFault::None };
        self.count(FaultKind::DelayedEvent);
        WatchFault::Delay(
            max_delay.mul_f64(f64::from(u16::try_from(draw % 1000).unwrap_or_default()) / 1000.0),
        )
    }

    /// Returns the kind with the lower count: both must happen even in a short run.
    fn less_frequent(&self, one: FaultKind, other: FaultKind) -> FaultKind {
        let count = |kind: FaultKind| self.counts.get(&kind).copied().unwrap_or_default();
        if count(one) <= count(other) { one } else { other }
    }

    /// Returns N if one in N requests fails now.
    fn failure_interval(&self) -> Option<u64> {
        let intervals = self.running.iter().filter_map(|kind| match kind {
            EpisodeKind::Failures { every } => Some(*every),
            _ => None,
        });
        intervals.min()
    }
}

fn refusal(draw: u64) -> ApiError {
    match draw % 3 {
        0 => ApiError::too_many_requests("the server is busy, try again later"),
        1 => ApiError::internal("etcdserver: request timed out"),
        _ => ApiError::unavailable("the server is shutting down"),
    }
}
