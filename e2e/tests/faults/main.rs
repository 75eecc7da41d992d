//! API server faults, injected one at a time against the real controller.
//!
//! The controller is the built program in its own process; API server, scheduler and controllers
//! are simulated by `tessera-simcluster` in this process. Every change of every claim is observed
//! through an endpoint without faults.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clocks;
mod conflicts;
mod expensive;
mod harness;
mod server;
mod watches;
