//! How driver and controller reach the API server: the client by the flag that both have, and
//! watches that go on.

mod client;
mod watching;

pub use client::{ClientError, client};
pub use watching::patiently;
