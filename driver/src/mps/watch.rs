//! Watches over the control daemons that claims need, for metrics and for the operator.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tessera_api::{labels::event, names::GpuUuid};
use tessera_mps_protocol::{State, Status};
use tokio::{
    sync::{mpsc, watch},
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use super::Mps;
use crate::{events::NodeNews, metrics::Metrics, state::journal::Journal};

/// Between two looks: a few small files on a tmpfs.
const EVERY: Duration = Duration::from_secs(2);

/// Watches over the daemons of the GPUs that the journal's claims share by MPS.
#[derive(Debug)]
pub struct MpsWatch {
    mps: Mps,
    journal: watch::Receiver<Arc<Journal>>,
    metrics: Arc<Metrics>,
    news: mpsc::UnboundedSender<NodeNews>,
    /// What was last seen of each.
    seen: BTreeMap<GpuUuid, Seen>,
}

/// What was last seen of a daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// How often it was started.
    starts: u64,
    /// It was up at some time, and is not now: the operator was told.
    has_failed: bool,
    /// It was up at some time.
    was_ready: bool,
}

impl MpsWatch {
    /// Tells of what `mps` says.
    #[must_use]
    pub fn new(
        mps: Mps,
        journal: watch::Receiver<Arc<Journal>>,
        metrics: Arc<Metrics>,
        news: mpsc::UnboundedSender<NodeNews>,
    ) -> Self {
        Self { mps, journal, metrics, news, seen: BTreeMap::new() }
    }

    /// Goes on until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut ticks = interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                // A daemon that is given up and wanted again soon after is another one.
                changed = self.journal.changed() => match changed {
                    Ok(()) => drop(self.forget()),
                    Err(_) => return,
                },
                _ = ticks.tick() => self.round(),
            }
        }
    }

    /// Forgets what nobody shares by MPS any more; answers what somebody does.
    fn forget(&mut self) -> BTreeSet<GpuUuid> {
        let gpus = self.journal.borrow_and_update().gpus_by_mps(None);
        self.seen.retain(|gpu, _| gpus.contains(gpu));
        gpus
    }

    /// One look at each.
    pub fn round(&mut self) {
        let gpus = self.forget();
        let has_keeper = gpus.is_empty() || self.mps.has_keeper();
        let mut daemons = BTreeMap::new();
        for gpu in gpus {
            // What a keeper that is gone said holds no longer.
            let status = self.mps.status(&gpu).map(|status| match has_keeper {
                true => status,
                false => Status {
                    state: State::Failed,
                    message: "tessera-mps is not running".to_owned(),
                    ..status
                },
            });
            let Some(status) = status else {
                daemons.insert(gpu, (false, 0));
                continue;
            };
            let seen = self.seen.entry(gpu.clone()).or_default();
            if let Some(note) = seen.look(&gpu, &status) {
                tracing::warn!("{note}");
                // Nobody hears it any more where the driver stops.
                let _ = self.news.send(NodeNews { reason: event::MPS_DAEMON_FAILED, note });
            }
            daemons.insert(gpu, (status.state == State::Ready, status.starts));
        }
        self.metrics.mps_daemons(&daemons);
    }
}

impl Seen {
    /// What is to be said of it: once for each time that it fails after it was up, or was started
    /// again between two looks.
    fn look(&mut self, gpu: &GpuUuid, status: &Status) -> Option<String> {
        let is_ready = status.state == State::Ready;
        let restarted = self.was_ready && status.starts > self.starts;
        let failed = self.was_ready && !is_ready;
        let is_news = (failed || restarted) && !self.has_failed;
        self.starts = status.starts;
        self.was_ready |= is_ready;
        self.has_failed = failed;
        is_news.then(|| {
            let why = if is_ready { "it was started again" } else { status.message.as_str() };
            format!(
                "the MPS control daemon of {gpu} failed ({why}): CUDA programs that were its clients have lost their contexts and must be \
                 restarted; tessera-mps starts it again"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(state: State, starts: u64) -> Status {
        Status { state, message: "signal 9".to_owned(), starts }
    }

    #[test]
    fn a_daemon_that_fails_after_it_was_up_is_told_once() {
        let gpu = GpuUuid::new("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID");
        let mut seen = Seen::default();
        let mut told = |state, starts| seen.look(&gpu, &status(state, starts)).is_some();
        assert!(!told(State::Failed, 1), "who waits for it is told by its own event");
        assert!(!told(State::Ready, 2) && !told(State::Ready, 2));
        assert!(told(State::Failed, 2) && !told(State::Failed, 2) && !told(State::Starting, 3));
        assert!(!told(State::Ready, 3), "it was told when it failed");
        assert!(told(State::Ready, 4), "nobody looked meanwhile");
    }
}
