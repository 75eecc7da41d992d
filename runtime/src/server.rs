//! Servers of metrics and health checks whose cost is bounded.
//!
//! Every pod of a cluster may reach the port of a daemon. Its connections must cost the daemon
//! neither memory, open files nor time of the threads on which its work runs:
//!
//! | module | contents |
//! |---|---|
//! | [`http`] | an HTTP server on a thread of its own, with few connections and deadlines |
//! | [`single_flight`] | one computation for all who wait for its result |
//! | [`health`] | a socket in the file system for probes, which other pods do not reach |
//! | `tls` | connections with TLS, which serve many requests (feature `tls`) |

pub mod health;
pub mod http;
pub mod single_flight;
#[cfg(feature = "tls")]
pub mod tls;
