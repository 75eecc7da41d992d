//! Conformance, placement, topology and speed benchmarks of the allocator.
//!
//! Each is a binary of this crate on top of one module of this library. It accepts any input of its
//! format and prints a machine-readable last line:
//!
//! - `backlog` ([`backlog`]): CPU time of the controller's steps beside waiting pods.
//! - `bench` ([`mod@bench`]): speed of the allocator, beside upstream's.
//! - `bench --refused` ([`refused`]): cost of plans that refuse all pods.
//! - `conformance` ([`conformance`]): comparison of the allocator's results with golden scenarios
//!   of upstream's.
//! - `day` ([`day`]): a rolling day of a large cluster, with models of the API server and
//!   kube-scheduler.
//! - `scale` ([`scale`]): memory and CPU time of the index and the planner on a large cluster.
//! - `placement` ([`placement`]): share of a cluster's GPUs that a policy leaves unallocated when a
//!   published trace is replayed.
//! - `stuck` ([`stuck`]): CPU time of the controller's steps beside pods that get no devices until
//!   a user changes them.
//! - `topology` ([`topology`]): link quality of the GPU sets that policies choose, on link matrices
//!   of real machines.
//!
//! The crate is only for development. The tests read golden cases, traces and machines from
//! `testing/data`; the programs read the files of their arguments.

#![forbid(unsafe_code)]

mod answers;
pub mod backlog;
pub mod bench;
pub mod conformance;
mod controller;
pub mod day;
pub mod placement;
mod random;
pub mod refused;
pub mod scale;
pub mod scenario;
pub mod stuck;
pub mod topology;
