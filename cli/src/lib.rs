//! `kubectl tessera`: GPU usage, pending pods, placement simulation, and drains of GPUs.
//!
//! ```text
//!   kubeconfig --cluster--> Snapshot <--file-- FILE (kubectl tessera snapshot)
//!                              |   the fields that planning reads
//!                              v
//!                       tessera_index::Index, tessera_allocator::plan     as in the controller
//!                              |
//!        +---------------------+-----------------------+
//!        v                     v                       v
//!   tree::GpuTree     explain::PodReport    simulate::Simulation          data: -o json, -o yaml
//!        |                     |                       |
//!        '------------------ output ------------------ '                  text for people
//! ```
//!
//! `cluster` lists objects and `usage` asks the drivers for the actual use of the tree's
//! allocations; everything between a snapshot and its text is pure. Only [`maintenance`]
//! and [`resize`] write: DeviceTaintRules of cordoned GPUs, evictions, and GpuResizes.
//!
//! Exit codes: 0 success, 1 error, 2 the pod or claim is pending or does not fit
//! ([`run::ExitStatus`]).

#![forbid(unsafe_code)]

pub mod args;
pub mod cluster;
pub mod convert;
pub mod defragment;
pub mod doctor;
pub mod explain;
pub mod maintenance;
pub mod output;
pub mod preemption;
pub mod quota;
pub mod resize;
pub mod run;
pub mod simulate;
pub mod snapshot;
pub mod terminal;
pub mod tree;
pub mod usage;

mod devices;
mod input;
mod pod_claims;
mod yaml;
