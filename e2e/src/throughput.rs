//! Benchmark of pods bound per second and of the latency from creation to binding. It compares
//! Tessera with kube-scheduler alone on the same hollow nodes (`make bench-cluster`).
//!
//! ```text
//! plan ----------> rounds, alternating: kube-scheduler, Tessera, Tessera, kube-scheduler
//!                    | e2e/cluster/bench.sh: a fresh control plane for each
//!                    v
//! round: hollow nodes -> load (pods created, watched) -> figures, with usage (/proc) --> report
//! ```
//!
//! Nothing is asserted: figures depend on the machine, which is reported with them. Only ratios
//! between rounds of one run are comparable.

pub mod load;
pub mod plan;
pub mod report;
pub mod round;
pub mod usage;

pub(crate) mod preparation;
pub(crate) mod quantiles;
mod scheduler;
