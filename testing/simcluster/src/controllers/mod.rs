//! The pieces of kube-controller-manager that matter here: resource claims, namespaces, garbage.
//!
//! Each controller is one task with its own user name and one loop: take changes from watches, and
//! while there are none, do one piece of work. What fails is done again after a growing delay.
//!
//! Left out: node life cycle (no taints for silent nodes, no eviction), pod garbage (pods of
//! deleted nodes stay), device taint eviction, workloads (Deployments, Jobs).

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
    /// Starts all of them.
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

    /// Ends all of them between two pieces of work.
    pub async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}
