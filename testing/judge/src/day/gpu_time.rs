//! GPU time by what it is used for.

use tessera_controller::core::clock::Moment;

use super::api_server::{ApiServer, GPU_MIB};
use crate::scale::GPUS;

/// Sums of memory and time, in MiB-seconds.
#[derive(Debug, Default)]
pub(super) struct GpuTime {
    until: Option<Moment>,
    seconds: f64,
    allocated: f64,
    waiting_groups: f64,
    waiting_pods: f64,
}

impl GpuTime {
    /// Counts the time until `now`, in which nothing has changed.
    pub(super) fn pass(&mut self, now: Moment, api: &ApiServer) {
        let since = self.until.replace(now).unwrap_or(now);
        let seconds = (now - since).as_secs_f64();
        let sums = api.sums;
        self.seconds += seconds;
        self.allocated += sums.allocated as f64 * seconds;
        self.waiting_groups += sums.waiting_groups as f64 * seconds;
        self.waiting_pods += sums.waiting_pods as f64 * seconds;
    }

    /// Returns the allocated part of the memory of these nodes, and of that the parts of groups and
    /// of single pods that are not bound, in percent.
    pub(super) fn percentages(&self, nodes: usize) -> [f64; 3] {
        let all = GPU_MIB as f64 * (nodes * GPUS) as f64 * self.seconds;
        let part = |of: f64, all: f64| 100.0 * of / all.max(1.0);
        [
            part(self.allocated, all),
            part(self.waiting_groups, self.allocated),
            part(self.waiting_pods, self.allocated),
        ]
    }
}
