//! Supervises the MPS control daemons of a node: one for each GPU that claims share by NVIDIA MPS.
//!
//! ```text
//! tessera-driver                       tessera-mps (supervisor)
//!     | wanted::want                       | wanted::read --> plan::plan --> supervisor
//!     v                                    |                                   | directory, tmpfs: creates, mounts
//! <state-dir>/mps/wanted/<GPU UUID> ------>+                                   | enter: own mount namespace
//!                                                                              v
//! <state-dir>/mps/supervisor.lock  <-- lock                           nvidia-cuda-mps-control -f
//! <state-dir>/mps/daemons/<GPU UUID>/status.json  <-- status                   |
//!                                   /pipe, /shm   ----> containers             | its /dev/shm is shm/
//!                                    /log  <------------------------------------+
//! ```
//!
//! Daemons are not children of tessera-driver: they, and the pods that use them, survive its
//! restarts and updates. The two programs communicate through files on a tmpfs that is at the same
//! path on the host and in both pods. Each file has one writer. The crate `tessera-mps-protocol`
//! defines these files.
//!
//! # Requirements of the pod
//!
//! - `privileged: true`, to mount and to unshare its mount namespace; `hostPID: true`, so that the
//!   PIDs that the kernel reports to a daemon for its clients are valid, and orphans of an earlier
//!   supervisor are visible.
//! - The state directory with `mountPropagation: Bidirectional`, at its path on the host:
//!   containers get `pipe/` and `shm/` from there, each a tmpfs of its own.
//! - The driver root, if `--driver-root` is not `/`, with `mountPropagation: HostToContainer`. It
//!   has the directories `/tmp` and `/dev/shm`, and needs nothing else except NVIDIA's files. The
//!   parts of the state directory that a daemon needs there are mounted for it alone ([`enter`]).

#![forbid(unsafe_code)]

pub mod args;
mod backoff;
mod cleanup;
mod control;
mod daemon;
mod directory;
pub mod enter;
mod log_tail;
pub mod plan;
pub mod run;
pub mod shm;
pub mod supervisor;
mod tmpfs;
