//! End-to-end tests: the same scenario files and the same trials on any cluster, by its kubeconfig.
//!
//! ```text
//! scenarios/*.yaml -- scenario (parse) --> runner (apply, wait by watch, compare) --> harness (list, run, report)
//!                                             |  kube client                             ^
//!                                             v                                          |
//!                            any cluster: simcluster, e2e/cluster, kind, yours       trials (restarts, 100 pods)
//!                                             ^                                          |
//!                                             +------ operations: $TESSERA_E2E_NODE -----+
//! ```
//!
//! Nothing here sleeps for a fixed time and hopes: every wait is for something that a watch or a
//! log stream tells, with a deadline, and says what it saw last when that passes.
#![forbid(unsafe_code)]

pub mod examples;
pub mod expectation;
pub mod harness;
pub mod helm;
pub mod hollow;
pub mod inventory;
pub mod leftovers;
pub mod objects;
pub mod operations;
pub mod plugin;
pub mod proxy;
pub mod random;
pub mod runner;
pub mod scenario;
pub mod served;
pub mod throughput;
pub mod trials;
pub mod wait;
