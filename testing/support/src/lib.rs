//! What tests of several crates share: the files of `testing/data`, and reports of skipped tests.
//!
//! A test whose input is missing or empty fails: the functions of [`data`] panic. A test that cannot run on this machine calls
//! [`report_skip`], and CI fails unless `.ci/allowed-skips` has the test's name.

#![forbid(unsafe_code)]

pub mod data;
mod skip;

pub use skip::{enclosing_function, report_skip, skip_line};
