//! What the programs share that run unattended.
//!
//! | module | feature | contents |
//! |---|---|---|
//! | [`error_chain`] | | an error and its causes on one line |
//! | `address`, `log`, `signals` | `process` | flags, log lines and signals, the same for each program |
//! | `cluster` | `cluster` | the client of the API server, and watches that go on |
//! | `fault_points` | `fault-points` | places where crash tests kill or hold a program; in nothing that ships |

#![forbid(unsafe_code)]

#[cfg(feature = "process")]
pub mod address;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod error_chain;
#[cfg(feature = "fault-points")]
pub mod fault_points;
#[cfg(feature = "process")]
pub mod log;
#[cfg(feature = "process")]
pub mod signals;
