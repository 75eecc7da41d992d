//! Programs that judge the allocator against something outside of it.
//!
//! Each is a binary of this crate over one module of this library, takes any input of its format,
//! and closes with one line that a script can read:
//!
//! - `bench` ([`mod@bench`]): how long the allocator takes, beside upstream's.
//! - `conformance` ([`conformance`]): whether the allocator answers golden scenarios as upstream's
//!   does.
//! - `placement` ([`placement`]): how much of a cluster's GPUs a policy leaves unused when a
//!   published trace is replayed.
//! - `topology` ([`topology`]): how well the GPUs of one request are joined, on link matrices of
//!   real machines.
//!
//! Nothing here ships. The tests read golden cases, traces and machines from `testing/data`; the
//! programs read the files that they are given.

#![forbid(unsafe_code)]

pub mod bench;
pub mod conformance;
pub mod placement;
pub mod scenario;
pub mod topology;
