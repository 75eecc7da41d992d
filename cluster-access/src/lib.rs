//! How driver and controller reach the API server: the client by the flag that both have, and the pauses of their watches.

mod client;
mod pause;

pub use client::{ClientError, client};
pub use pause::ByTime;
