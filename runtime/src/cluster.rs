//! Kubernetes client construction and watch backoff.

mod client;
mod watching;

pub use client::{ClientError, client};
pub use watching::with_backoff;
