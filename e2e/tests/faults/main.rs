//! What a real API server does to its clients, done to the real controller, one fault at a time.
//!
//! The controller is the built program in a process of its own; API server, scheduler and
//! controllers are the stand-ins of `tessera-simcluster` in this process. Every change of every
//! claim is looked at through an entrance that knows no faults.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clocks;
mod conflicts;
mod expensive;
mod rig;
mod server;
mod watches;
