//! Checks of names, comments and documentation that rustfmt and clippy do not have.

#![forbid(unsafe_code)]

pub mod allowed;
pub mod repository;
pub mod rules;
