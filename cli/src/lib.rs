//! `kubectl tessera`: what GPUs there are and who holds them, why a pod waits, what would be placed
//! where.
//!
//! ```text
//!   kubeconfig --cluster--> Snapshot <--file-- FILE (kubectl tessera snapshot)
//!                              |   what planning needs of each object, and no more
//!                              v
//!                       tessera_index::Index, tessera_allocator::plan        the controller's own
//!                              |
//!        +---------------------+-----------------------+
//!        v                     v                       v
//!   tree::Tree        explain::Report        simulate::Simulation            data: -o json, -o yaml
//!        |                     |                       |
//!        '---------------- output -------------------- '                     text for people
//! ```
//!
//! Nothing here writes to a cluster. Only `cluster` talks to one; all that is between a snapshot
//! and text is pure.
//!
//! Exit codes: 0 all is well, 1 an error, 2 the pod or claim has to wait or does not fit
//! ([`run::Exit`]).

#![forbid(unsafe_code)]

pub mod args;
pub mod cluster;
pub mod explain;
pub mod output;
pub mod run;
pub mod simulate;
pub mod snapshot;
pub mod tree;

mod devices;
