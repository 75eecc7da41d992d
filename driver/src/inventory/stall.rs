//! Detects that the GPU library hangs: the thread `gpus` then makes no progress.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tessera_api::{events, gpu::Health};
use tokio::{
    sync::{mpsc, watch},
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use super::HardwareState;
use crate::{events::NodeEvent, metrics::DriverMetrics};

/// Interval of checks.
const INTERVAL: Duration = Duration::from_secs(5);

/// Longest time between two answers of the library. While all is well it answers every second.
pub(super) const STALLED_AFTER: Duration = Duration::from_secs(60);

/// The `code` of GPUs that are unhealthy for this reason.
pub(super) const STALLED_CODE: &str = "NVMLTimeout";

/// Progress of the thread `gpus`. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress(Arc<Mutex<ProgressState>>);

#[derive(Debug, Default)]
struct ProgressState {
    /// The last answer of the library or the start of the thread. `None` while the thread waits
    /// for something else.
    last: Option<Instant>,
    is_stalled: bool,
}

impl Progress {
    /// Records that the library answered, be it with an error, or that the thread starts. Returns
    /// true if it was stalled: the inventory must be read again.
    pub(super) fn record(&self, now: Instant) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.last = Some(now);
        std::mem::take(&mut state.is_stalled)
    }

    /// Stops the detection until the next answer: the thread waits for something else.
    pub(super) fn suspend(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).last = None;
    }

    /// Returns true while the library hangs.
    fn is_stalled(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_stalled
    }

    /// Returns true if the library has just been found to hang.
    fn check(&self, now: Instant) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_stalled =
            state.last.is_some_and(|last| now.saturating_duration_since(last) > STALLED_AFTER);
        let is_new = is_stalled && !state.is_stalled;
        state.is_stalled |= is_stalled;
        is_new
    }
}

/// Marks all GPUs as unhealthy while the library hangs.
#[derive(Debug)]
pub(super) struct StallWatch {
    pub(super) progress: Progress,
    pub(super) hardware: watch::Sender<Arc<HardwareState>>,
    pub(super) metrics: Arc<DriverMetrics>,
    pub(super) events: mpsc::UnboundedSender<NodeEvent>,
}

impl StallWatch {
    /// Checks until `stop`.
    pub(super) async fn run(self, stop: CancellationToken) {
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            self.check(Instant::now());
        }
    }

    /// Checks once. The thread `gpus` clears the mark at its next look, since it then sends the
    /// GPUs as the library reports them.
    pub(super) fn check(&self, now: Instant) {
        if !self.progress.check(now) {
            return;
        }
        let seconds = STALLED_AFTER.as_secs();
        let message = format!("NVML has not answered for {seconds} s");
        tracing::error!(seconds, "NVML hangs; GPUs are tainted until it answers");
        self.metrics.set_nvml_up(false);
        let note = format!(
            "{message}: the GPUs of this node get no new claims until it answers; see the kernel log for errors of the NVIDIA driver"
        );
        // The receiver is gone when the driver stops.
        let _ = self.events.send(NodeEvent { reason: events::GPU_UNHEALTHY, note });
        self.hardware.send_if_modified(|state| {
            // The thread may have sent an answer in between.
            if !self.progress.is_stalled() {
                return false;
            }
            let HardwareState::Known(inventory) = &**state else {
                // Nothing was ever read: what an earlier process published must not stay.
                let reason = message.clone();
                *state = Arc::new(HardwareState::Unknown { reason, is_queried: true });
                return true;
            };
            let mut inventory = inventory.clone();
            for gpu in inventory.gpus.iter_mut().filter(|gpu| gpu.is_healthy()) {
                let code = STALLED_CODE.to_owned();
                gpu.health = Health::Unhealthy { code, message: message.clone() };
            }
            let gpus = inventory.gpus.len();
            self.metrics.set_gpu_counts(gpus, gpus, &inventory.unpublished_by_reason());
            *state = Arc::new(HardwareState::Known(inventory));
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_before_first_answer_is_no_stall() {
        let (progress, now) = (Progress::default(), Instant::now());
        assert!(!progress.check(now + 2 * STALLED_AFTER));
        assert!(!progress.record(now));
        assert!(!progress.check(now + STALLED_AFTER));
    }

    #[test]
    fn stall_is_reported_once_and_ends_with_an_answer() {
        let (progress, now) = (Progress::default(), Instant::now());
        progress.record(now);
        let late = now + STALLED_AFTER + Duration::from_secs(1);
        assert!(progress.check(late) && !progress.check(late));
        assert!(progress.record(late), "the inventory is to be read again");
        assert!(!progress.record(late) && !progress.check(late));
    }
}
