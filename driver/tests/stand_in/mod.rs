//! What the driver works with, standing in: an API server in this process, GPUs of a machine that
//! is not there, a kubelet that calls over the real sockets, and mounts that are only remembered.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

pub mod api;
pub mod container;
pub mod gpus;
pub mod kubelet;
pub mod mounts;
pub mod node;
