//! Reports the state of MPS control daemons as metrics and events.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tessera_api::{events, names::GpuUuid};
use tessera_mps_protocol::{MpsDaemonState, MpsDaemonStatus};
use tokio::{
    sync::{mpsc, watch},
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use super::Mps;
use crate::{events::NodeEvent, metrics::DriverMetrics, state::journal::Journal};

/// Interval of rounds. Each reads a few small files on a tmpfs.
const INTERVAL: Duration = Duration::from_secs(2);

/// Watches the daemons of the GPUs that claims of the journal share by MPS.
#[derive(Debug)]
pub struct MpsWatch {
    mps: Mps,
    journal: watch::Receiver<Arc<Journal>>,
    metrics: Arc<DriverMetrics>,
    events: mpsc::UnboundedSender<NodeEvent>,
    /// The last observation of each daemon.
    seen: BTreeMap<GpuUuid, DaemonObservation>,
}

/// The last observation of a daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DaemonObservation {
    /// Number of starts.
    starts: u64,
    /// True if it failed after it was ready. That was reported.
    has_failed: bool,
    /// True if it was ever ready.
    was_ready: bool,
}

impl MpsWatch {
    /// Returns a watch that reports the states that `mps` reads.
    #[must_use]
    pub fn new(
        mps: Mps,
        journal: watch::Receiver<Arc<Journal>>,
        metrics: Arc<DriverMetrics>,
        events: mpsc::UnboundedSender<NodeEvent>,
    ) -> Self {
        Self { mps, journal, metrics, events, seen: BTreeMap::new() }
    }

    /// Watches until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                // A daemon that is released and requested again is a new one.
                changed = self.journal.changed() => match changed {
                    Ok(()) => drop(self.retain_shared()),
                    Err(_) => return,
                },
                _ = ticks.tick() => self.round(),
            }
        }
    }

    /// Forgets GPUs that no claim shares by MPS any more. Returns those that claims share.
    fn retain_shared(&mut self) -> BTreeSet<GpuUuid> {
        let gpus = self.journal.borrow_and_update().mps_gpus(None);
        self.seen.retain(|gpu, _| gpus.contains(gpu));
        gpus
    }

    /// Reads the status of each daemon once.
    pub fn round(&mut self) {
        let gpus = self.retain_shared();
        let has_supervisor = gpus.is_empty() || self.mps.has_supervisor();
        let mut daemons = BTreeMap::new();
        for gpu in gpus {
            // The last status of a tessera-mps that is gone is not valid any more.
            let status = self.mps.status(&gpu).map(|status| match has_supervisor {
                true => status,
                false => MpsDaemonStatus {
                    state: MpsDaemonState::Failed,
                    message: "tessera-mps is not running".to_owned(),
                    ..status
                },
            });
            let Some(status) = status else {
                daemons.insert(gpu, (false, 0));
                continue;
            };
            let seen = self.seen.entry(gpu.clone()).or_default();
            if let Some(note) = seen.observe(&gpu, &status) {
                tracing::warn!(%gpu, note, "MPS control daemon failed");
                // The receiver is gone when the driver stops.
                let _ = self.events.send(NodeEvent { reason: events::MPS_DAEMON_FAILED, note });
            }
            daemons.insert(gpu, (status.state == MpsDaemonState::Ready, status.starts));
        }
        self.metrics.set_mps_daemons(&daemons);
    }
}

impl DaemonObservation {
    /// Returns the note of an event: once for each failure after it was ready, also if it was
    /// restarted between two rounds.
    fn observe(&mut self, gpu: &GpuUuid, status: &MpsDaemonStatus) -> Option<String> {
        let is_ready = status.state == MpsDaemonState::Ready;
        let restarted = self.was_ready && status.starts > self.starts;
        let failed = self.was_ready && !is_ready;
        let is_reported = (failed || restarted) && !self.has_failed;
        self.starts = status.starts;
        self.was_ready |= is_ready;
        self.has_failed = failed;
        is_reported.then(|| {
            let why = if is_ready { "it was restarted" } else { status.message.as_str() };
            format!(
                "MPS control daemon of {gpu} failed ({why}): CUDA programs that were its clients have lost their contexts and must be \
                 restarted; tessera-mps restarts the daemon"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(state: MpsDaemonState, starts: u64) -> MpsDaemonStatus {
        MpsDaemonStatus { state, message: "signal 9".to_owned(), starts }
    }

    #[test]
    fn daemon_failure_is_reported_once() {
        let gpu = GpuUuid::new("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID");
        let mut seen = DaemonObservation::default();
        let mut is_reported = |state, starts| seen.observe(&gpu, &status(state, starts)).is_some();
        assert!(!is_reported(MpsDaemonState::Failed, 1), "a waiting claim has an event of its own");
        assert!(!is_reported(MpsDaemonState::Ready, 2) && !is_reported(MpsDaemonState::Ready, 2));
        assert!(
            is_reported(MpsDaemonState::Failed, 2)
                && !is_reported(MpsDaemonState::Failed, 2)
                && !is_reported(MpsDaemonState::Starting, 3)
        );
        assert!(!is_reported(MpsDaemonState::Ready, 3), "it was reported when it failed");
        assert!(is_reported(MpsDaemonState::Ready, 4), "it was restarted between two rounds");
    }
}
