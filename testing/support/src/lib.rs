//! Test support for several crates: the files of `testing/data`, reports of skipped tests, and,
//! with the feature `kubernetes`, the nodes that have published their devices.
//!
//! A test with a missing or empty input fails: the functions of [`data`] panic. A test that cannot
//! run on this machine calls [`report_skip`]; CI fails unless `.ci/allowed-skips` has the test's
//! name.

#![forbid(unsafe_code)]

pub mod data;
mod skip;
#[cfg(feature = "kubernetes")]
pub mod slices;

pub use skip::{enclosing_function, report_skip, skip_line};
