//! A simulated cluster in one process, for tests and the demo.
//!
//! ```text
//!   kube-rs clients, kubectl, tessera-driver, tessera-controller   (real programs, by kubeconfig)
//!        |  HTTP on 127.0.0.1
//!        v
//!   api/          storage, list, watch, patches, validation, admission      sole owner of objects
//!        ^
//!        |  the same HTTP, each part with a user name of its own
//!   controllers/  claims from templates, reservedFor, namespaces, garbage collection
//!   scheduler/    filter, reserve, bind, post-filter
//!   node/         fake kubelet and container runtime
//! ```
//!
//! To keep the fakes faithful, the scenario files under `e2e/scenarios` run on this cluster and on
//! a real one. Each module lists its simplifications at the top.

#![forbid(unsafe_code)]

pub mod api;
pub mod chaos;
pub mod cluster;
pub mod controllers;
mod events;
mod informer;
pub mod node;
mod pod_claim;
mod queue;
pub mod scheduler;
