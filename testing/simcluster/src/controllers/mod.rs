//! The parts of kube-controller-manager needed here: claims, namespaces, garbage collection.
//!
//! Each controller is one task with its own user name and one loop: it handles changes from
//! watches, and while there are none, one work item. Failed work is retried after a growing delay.
//!
//! Left out: node life cycle (no taints for unresponsive nodes, no eviction), pod garbage
//! collection (pods of deleted nodes stay), device taint eviction, workloads (Deployments, Jobs).

mod claim;
mod garbage;
mod namespace;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::api::{ApiServer, User};

/// Running controllers. Dropping them ends their tasks.
pub struct Controllers {
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Controllers {
    /// Starts all controllers.
    pub fn start(api: &ApiServer) -> Self {
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let client = |name: &str| api.client(&User::service_account("kube-system", name));
        tasks.spawn(claim::Controller::new(client("resource-claim-controller")).run(stop.clone()));
        tasks.spawn(namespace::Controller::new(client("namespace-controller")).run(stop.clone()));
        tasks
            .spawn(garbage::Controller::new(client("generic-garbage-collector")).run(stop.clone()));
        Self { tasks, stop }
    }

    /// Stops all controllers after their current work item.
    pub async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}
