//! gRPC services that the kubelet calls.
//!
//! ```text
//! <kubelet-root>/plugins_registry/<driver>[-<podUID>]@reg.sock  registration; stopped first
//! <kubelet-root>/plugins/<driver>/dra[-<podUID>].sock           plugin, health; started first
//! ```

pub mod health;
pub mod plugin;
pub mod registration;
pub mod server;
pub mod socket;
