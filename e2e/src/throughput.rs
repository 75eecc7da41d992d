//! How many pods a control plane binds per second, and how long each takes from its creation:
//! Tessera beside kube-scheduler alone, on the same nodes without kubelets (`make bench-cluster`).
//!
//! ```text
//! plan ----------> rounds, in turn: kube-scheduler, Tessera, Tessera, kube-scheduler
//!                    | e2e/cluster/bench.sh: a fresh control plane for each
//!                    v
//! round: hollow nodes -> load (pods created, watched) -> figures, with usage (/proc) --> report
//! ```
//!
//! Nothing is asserted: figures depend on the machine, which is reported with them. What can be
//! compared is the ratio of rounds of one run.

pub mod load;
pub mod plan;
pub mod report;
pub mod round;
pub mod usage;

mod quantiles;
mod scheduler;
