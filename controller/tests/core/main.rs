//! The core, without an API server, a runtime or mocks: scenes and interleavings.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../fake_api/objects.rs"]
mod objects;

mod actors;
mod decisions;
mod defaults;
mod explanations;
mod group_preemption;
mod groups;
mod interleavings;
mod loads;
mod nominations;
mod placeholders;
mod preemption;
mod purity;
mod quotas;
mod recovery;
mod resizes;
mod templates;
mod world;
