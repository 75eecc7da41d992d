//! Fakes of the driver's environment: an API server in this process, GPUs, a kubelet that calls
//! over the real sockets, and recorded mounts.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

pub mod api;
pub mod container;
pub mod gpus;
pub mod kubelet;
pub mod ledger;
pub mod mounts;
pub mod node;

/// Advances the clock. It runs on afterwards, since the driver's calls use sockets.
pub async fn advance(duration: std::time::Duration) {
    tokio::time::pause();
    tokio::time::advance(duration).await;
    tokio::time::resume();
}
