//! Files through which tessera-driver and tessera-mps exchange the state of MPS control daemons.
//!
//! They are on a tmpfs that is at the same path on the host and in both pods. Each file has one
//! writer.
//!
//! | file, below `<state-dir>/mps/` | contents | writer |
//! |---|---|---|
//! | `wanted/<GPU UUID>` | requests a daemon for a GPU ([`wanted`]) | tessera-driver |
//! | `supervisor.lock` | locked while tessera-mps runs ([`lock`]) | tessera-mps |
//! | `daemons/<GPU UUID>/status.json` | status of the daemon ([`status`]) | tessera-mps |
//! | `daemons/<GPU UUID>/pipe/`, `shm/` | directories that are mounted into containers ([`layout`]) | tessera-mps |

#![forbid(unsafe_code)]

pub mod layout;
pub mod lock;
pub mod status;
pub mod wanted;

pub use layout::MpsPaths;
pub use lock::{supervisor_is_running, supervisor_pid};
pub use status::{MpsDaemonState, MpsDaemonStatus};
pub use wanted::set_wanted_gpus;
