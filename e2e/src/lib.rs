//! End-to-end tests: scenario files and trials that run on any cluster, given its kubeconfig.
//!
//! ```text
//! scenarios/*.yaml -> scenario (parse) -> runner (apply, watch, compare) -> harness (list, run)
//!                                           |  kube client                     ^
//!                                           v                                  |
//!                 any cluster: simcluster, e2e/cluster, kind, yours     trials (restarts, ...)
//!                                           ^                                  |
//!                                           +-- operations: $TESSERA_E2E_NODE -+
//! ```
//!
//! No test sleeps for a fixed time: every wait observes a watch or a log stream, has a deadline,
//! and reports the last observed state when the deadline passes.
#![forbid(unsafe_code)]

pub mod examples;
pub mod expectation;
pub mod harness;
pub mod helm;
pub mod hollow;
pub mod inventory;
pub mod karpenter;
pub mod leftovers;
pub mod objects;
pub mod operations;
pub mod plugin;
pub mod proxy;
pub mod random;
pub mod rolling_day;
pub mod runner;
pub mod scenario;
pub mod served;
pub mod throughput;
pub mod trials;
pub mod wait;
