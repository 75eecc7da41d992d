//! The allocating controller: the only writer of allocations of our devices.
//!
//! ```text
//!  API server --watch--> watch ---Change---> shell ---events---> core
//!                                              ^                   | effects
//!                                              '--outcomes-- executor --PATCH, POST--> API server
//!  leadership: renews the Lease; the process ends when it no longer leads
//! ```
//!
//! The [`core`] holds all state. It decides when something has changed, never by a timer, and
//! returns writes and events of Kubernetes as data. The executor performs them and reports their
//! outcomes as events. A decision counts as taken from the moment it is made. A plan has a budget
//! of steps: when they are spent, its decisions are written, and the next plan continues.
//!
//! | task | thread | owns | talks to |
//! |---|---|---|---|
//! | [`watch`], one per kind | runtime | the keys that it has delivered | shell |
//! | [`shell`] with the core | its own | all state | executor |
//! | executor, claim writes | runtime | the writes under way, a task each | shell |
//! | executor, claim templates and quota statuses | runtime | the writes under way | shell |
//! | executor, placeholder pods | runtime | the writes under way | shell |
//! | executor, events | runtime | the queue of events | shell |
//! | [`leadership`] | its own | the Lease | all, by ending the process |
//! | `server` | two or three of its own | connections of scrapes and probes | metrics |
//! | [`webhook`], in every replica | one of its own; certificate: runtime | the certificate | |
//! | [`fence`] | runtime | DeviceTaintRules of the fence | |
//! | [`webhook::publish`] | runtime | the objects of the webhook | |
//!
//! A task or thread of this table that ends unexpectedly ends the process, with its name and the
//! cause in the error ([`tessera_runtime::supervisor`]).

#![forbid(unsafe_code)]

pub mod commit;
pub mod core;
pub mod evict;
pub mod fence;
pub mod lead;
pub mod leadership;
pub mod metrics;
pub mod node_groups;
pub mod placeholder;
pub mod shell;
pub mod watch;
pub mod webhook;

mod args;
mod executor;
#[cfg(feature = "fault-points")]
pub mod fault;
#[cfg(not(feature = "fault-points"))]
mod fault;
mod loads;
mod nominate;
mod quota_status;
mod resize_status;
mod run;
mod server;
mod template;
mod write_queue;

pub use args::{Args, ControllerCommand};
