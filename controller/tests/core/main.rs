//! The core, without an API server, a runtime or mocks: scenes and interleavings.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../stand_in/objects.rs"]
mod objects;

mod actors;
mod decisions;
mod explanations;
mod interleavings;
mod world;
