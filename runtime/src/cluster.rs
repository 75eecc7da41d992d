//! Kubernetes client construction, evictions and watch backoff.

mod client;
mod eviction;
mod watching;

pub use client::{ClientError, client, client_without_retries};
pub use eviction::{EvictionAnswer, PodEviction, evict};
pub use watching::with_backoff;
