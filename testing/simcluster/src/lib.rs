//! An in-process cluster for tests and the demo.
//!
//! ```text
//!   kube-rs clients, kubectl, tessera-driver, tessera-controller      (real programs, by kubeconfig)
//!        |  HTTP on 127.0.0.1
//!        v
//!   api/          storage, list, watch, patches, validation, admission      the only owner of objects
//!        ^
//!        |  the same HTTP, each part under a user name of its own
//!   controllers/  claims from templates, reservedFor, namespaces, garbage
//!   scheduler/    filter, reserve, bind, post-filter
//!   node/         kubelet and container stand-ins
//! ```
//!
//! A stand-in rots when nothing holds it to the real thing: the scenario files under
//! `e2e/scenarios` run on this cluster and on a real one alike. What is simplified is said at the
//! top of each module.

#![forbid(unsafe_code)]

pub mod api;
pub mod chaos;
pub mod cluster;
pub mod controllers;
mod informer;
pub mod node;
mod pod_claim;
mod queue;
pub mod scheduler;
