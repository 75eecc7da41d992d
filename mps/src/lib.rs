//! Keeps the MPS control daemons of a node: one for each GPU that claims share by NVIDIA MPS.
//!
//! ```text
//!  tessera-driver                       tessera-mps, "the keeper"
//!      | wanted::want                       | wanted::read --> plan::plan --> keeper::Keeper
//!      v                                    |                                   | directory, tmpfs: makes, mounts
//!  <state-dir>/mps/wanted/<GPU UUID> ------>+                                   | enter: a mount namespace of its own
//!                                                                               v
//!  <state-dir>/mps/keeper.lock  <-- lock                           nvidia-cuda-mps-control -f
//!  <state-dir>/mps/daemons/<GPU UUID>/status.json  <-- status                   |
//!                                    /pipe, /shm   ----> containers             | its own /dev/shm is shm/
//!                                    /log  <------------------------------------+
//! ```
//!
//! Daemons are not tessera-driver's children: they outlive its restarts and updates, and pods with
//! them. The two programs speak through files on a tmpfs that is at the same path on the host and
//! in both pods. Each file has one writer.
//!
//! Those files are the crate `tessera-mps-protocol`.
//!
//! # What the program needs of its pod
//!
//! - `privileged: true`, to mount and to leave its mount namespace; `hostPID: true`, so that what
//!   the kernel tells a daemon of its clients means something, and so that it finds what an earlier
//!   keeper left.
//! - The state directory with `mountPropagation: Bidirectional`, at its path on the host:
//!   containers get `pipe/` and `shm/` from there, each a tmpfs of its own.
//! - Where `--driver-root` is not `/`, that, with `mountPropagation: HostToContainer`: it has
//!   directories `/tmp` and `/dev/shm`, and needs nothing else beside NVIDIA's files. What a daemon
//!   sees there of the state directory is mounted for it alone ([`enter`]).

#![forbid(unsafe_code)]

pub mod args;
mod backoff;
mod control;
mod daemon;
mod directory;
pub mod enter;
pub mod keeper;
mod log_tail;
pub mod plan;
mod remnants;
pub mod run;
pub mod shm;
mod tmpfs;
