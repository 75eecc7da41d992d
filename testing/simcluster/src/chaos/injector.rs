//! Does to an API server what a plan says, and counts it.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::plan::{Episode, FaultPlan, Kind, What};
use crate::api::{ApiError, ApiServer, Fault, RequestInfo, WatchCache, WatchFault};

/// How often each kind has happened.
pub type Report = BTreeMap<Kind, u64>;

/// Whose requests and watches are hit: those of what is tested. Outages hit everybody.
const VICTIMS: &str = "system:serviceaccount:tessera-system:";

/// A plan at work.
pub struct Injector {
    api: ApiServer,
    plan: FaultPlan,
    /// Files by which the clocks of programs are set, see `testing/fake/clock`.
    clocks: Vec<PathBuf>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    running: Vec<What>,
    /// How much has happened in each stream.
    streams: HashMap<String, u64>,
    report: Report,
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Injector {
    /// Begins to decide over requests. Nothing happens before [`Self::run`].
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

    /// Goes through the plan; afterwards everything is as it was, but for what the faults have
    /// done.
    ///
    /// # Errors
    /// A clock cannot be set.
    pub async fn run(self) -> std::io::Result<Report> {
        let start = Instant::now();
        let resumptions = self.api.expired_resumptions();
        let moments = moments(&self.plan.episodes);
        for (at, begins, what) in moments {
            tokio::time::sleep_until(start + at).await;
            tracing::info!(seed = self.plan.seed, ?what, begins, "episode");
            if begins { self.begin(what)? } else { self.end(what)? }
        }
        self.api.set_fault_hook(None);
        self.api.set_watch_fault_hook(None);
        let mut report = std::mem::take(&mut locked(&self.state).report);
        report.insert(Kind::ExpiredResumption, self.api.expired_resumptions() - resumptions);
        Ok(report)
    }

    fn begin(&self, what: &What) -> std::io::Result<()> {
        match *what {
            What::Outage { .. } => {
                self.api.go_down();
                locked(&self.state).count(Kind::Restart);
            }
            What::Forgetting => {
                self.api.forget_past();
                self.api.close_watches();
            }
            What::ServerClock { ahead } => {
                self.api.set_clock_ahead(ahead);
                locked(&self.state).count(Kind::ServerClock);
            }
            What::ProgramClock { program, ahead } => {
                self.set_clock(program, ahead)?;
                locked(&self.state).count(Kind::ProgramClock);
            }
            What::Lag { .. } | What::Storm { .. } | What::Trouble { .. } => {
                locked(&self.state).running.push(what.clone());
            }
        }
        Ok(())
    }

    fn end(&self, what: &What) -> std::io::Result<()> {
        match *what {
            What::Outage { keeps_cache } => {
                self.api.come_back(if keeps_cache { WatchCache::Kept } else { WatchCache::Fresh });
            }
            What::Forgetting => {}
            What::ServerClock { .. } => self.api.set_clock_ahead(0),
            What::ProgramClock { program, .. } => self.set_clock(program, 0)?,
            What::Lag { .. } | What::Storm { .. } | What::Trouble { .. } => {
                let mut state = locked(&self.state);
                if let Some(place) = state.running.iter().position(|running| running == what) {
                    state.running.remove(place);
                }
            }
        }
        Ok(())
    }

    fn set_clock(&self, program: usize, ahead: i64) -> std::io::Result<()> {
        let Some(path) = self.clocks.get(program % self.clocks.len().max(1)) else { return Ok(()) };
        // In place: the program has the file mapped.
        std::fs::File::options().write(true).open(path)?.write_all_at(&ahead.to_ne_bytes(), 0)
    }
}

/// Begins and ends, in order of time.
fn moments(episodes: &[Episode]) -> Vec<(Duration, bool, &What)> {
    let begins = episodes.iter().map(|episode| (episode.begins, true, &episode.what));
    let ends =
        episodes.iter().map(|episode| (episode.begins + episode.lasts, false, &episode.what));
    let mut moments: Vec<_> = begins.chain(ends).collect();
    moments.sort_by_key(|(at, ..)| *at);
    moments
}

impl State {
    fn count(&mut self, kind: Kind) {
        *self.report.entry(kind).or_default() += 1;
    }

    /// The next draw of a stream.
    fn draw(&mut self, plan: &FaultPlan, stream: String) -> (u64, u64) {
        let number = self.streams.entry(stream.clone()).or_default();
        *number += 1;
        (*number, plan.draw(&stream, *number))
    }

    fn decide(&mut self, plan: &FaultPlan, request: &RequestInfo) -> Fault {
        if !request.user.name.starts_with(VICTIMS) || self.running.is_empty() {
            return Fault::None;
        }
        let is_write = matches!(request.verb, "create" | "update" | "patch" | "delete");
        let (number, draw) =
            self.draw(plan, format!("{} {} {}", request.user.name, request.verb, request.resource));
        let storms = self.running.iter().filter_map(|what| match what {
            What::Storm { resource, every } => Some((*resource, *every)),
            _ => None,
        });
        let is_stormy =
            storms.into_iter().any(|(of, every)| of == request.resource && number % every == 0);
        let is_update = matches!(request.verb, "update" | "patch");
        if is_update && is_stormy {
            self.count(match request.resource {
                "leases" => Kind::OvertakenLease,
                "resourceslices" => Kind::OvertakenSlice,
                _ => Kind::OvertakenClaim,
            });
            return Fault::Overtake;
        }
        match self.trouble() {
            // A lease that is not renewed ends the leader: only some of its renewals get into
            // trouble.
            Some(every) if draw % every == 0 && is_write => {
                let error = refusal(draw / every);
                let kind = self.rarer(Kind::LostAnswer, Kind::Refusal);
                self.count(kind);
                if kind == Kind::LostAnswer {
                    Fault::LoseAnswer(error)
                } else {
                    Fault::Refuse(error)
                }
            }
            _ => Fault::None,
        }
    }

    fn decide_event(&mut self, plan: &FaultPlan, watch: &RequestInfo) -> WatchFault {
        if !watch.user.name.starts_with(VICTIMS) || self.running.is_empty() {
            return WatchFault::None;
        }
        let (_, draw) =
            self.draw(plan, format!("{} events of {}", watch.user.name, watch.resource));
        if let Some(every) = self.trouble()
            && draw % (2 * every) == 0
        {
            let kind = self.rarer(Kind::ExpiredWatch, Kind::BrokenWatch);
            self.count(kind);
            return if kind == Kind::ExpiredWatch { WatchFault::Expire } else { WatchFault::Break };
        }
        let lag = self.running.iter().find_map(|what| match what {
            What::Lag { resource, most } if *resource == watch.resource => Some(*most),
            _ => None,
        });
        let Some(most) = lag else { return WatchFault::None };
        self.count(Kind::LateEvent);
        WatchFault::Delay(
            most.mul_f64(f64::from(u16::try_from(draw % 1000).unwrap_or_default()) / 1000.0),
        )
    }

    /// Of two kinds that which has happened less: both have to happen in a short run too.
    fn rarer(&self, one: Kind, other: Kind) -> Kind {
        let count = |kind: Kind| self.report.get(&kind).copied().unwrap_or_default();
        if count(one) <= count(other) { one } else { other }
    }

    /// One in how many gets into trouble now.
    fn trouble(&self) -> Option<u64> {
        let troubles = self.running.iter().filter_map(|what| match what {
            What::Trouble { every } => Some(*every),
            _ => None,
        });
        troubles.min()
    }
}

fn refusal(draw: u64) -> ApiError {
    match draw % 3 {
        0 => ApiError::too_many_requests("the server is busy, try again later"),
        1 => ApiError::internal("etcdserver: request timed out"),
        _ => ApiError::unavailable("the server is shutting down"),
    }
}
