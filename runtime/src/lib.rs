//! Shared runtime of the daemons and tools.
//!
//! | module | feature | contents |
//! |---|---|---|
//! | [`error_chain`] | | an error and its causes on one line |
//! | `atomic_file` | `atomic-file` | files that are replaced in one step |
//! | `address`, `log`, `signals` | `process` | flags, log lines and signals |
//! | `open_files` | `process` | the limit of open files |
//! | `server` | `server` | HTTP servers and health sockets with limits |
//! | `supervisor` | `process` | named tasks whose unexpected end ends the process |
//! | `cluster` | `cluster` | client of the API server, and back-off of watches |
//! | `fault_points` | `fault-points` | fault injection for crash tests; not shipped |

#![forbid(unsafe_code)]

#[cfg(feature = "process")]
pub mod address;
#[cfg(feature = "atomic-file")]
pub mod atomic_file;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod error_chain;
#[cfg(feature = "fault-points")]
pub mod fault_points;
#[cfg(feature = "process")]
pub mod log;
#[cfg(feature = "process")]
pub mod open_files;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "process")]
pub mod signals;
#[cfg(feature = "process")]
pub mod supervisor;
