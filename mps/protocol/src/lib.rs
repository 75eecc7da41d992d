//! The files by which tessera-driver and tessera-mps tell each other of MPS control daemons: on a
//! tmpfs that is at the same path on the host and in both pods. Each file has one writer.
//!
//! | file, below `<state-dir>/mps/` | contents | writer |
//! |---|---|---|
//! | `wanted/<GPU UUID>` | a GPU that is to have a daemon ([`wanted`]) | tessera-driver |
//! | `keeper.lock` | held as long as tessera-mps runs ([`lock`]) | tessera-mps |
//! | `daemons/<GPU UUID>/status.json` | how the daemon is ([`status`]) | tessera-mps |
//! | `daemons/<GPU UUID>/pipe/`, `shm/` | what containers get of the daemon ([`layout`]) | tessera-mps |

#![forbid(unsafe_code)]

pub mod layout;
pub mod lock;
pub mod status;
pub mod wanted;

pub use layout::MpsPaths;
pub use lock::{keeper_is_alive, keeper_pid};
pub use status::{State, Status};
pub use wanted::want;
