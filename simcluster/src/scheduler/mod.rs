//! The pieces of kube-scheduler that matter here.

use crate::api::ApiServer;

/// How the scheduler behaves.
#[derive(Clone, Debug, Default)]
pub struct SchedulerOptions {}

/// A running scheduler.
pub struct Scheduler;

impl Scheduler {
    pub(crate) fn start(_api: &ApiServer, _options: SchedulerOptions) -> Self {
        Self
    }

    pub(crate) async fn stop(self) {}
}
