//! Layouts of the two files that a container gets with every share of a GPU, and the protocol by
//! which a process gets its PID of the host.
//!
//! ```text
//!  host (tessera-driver)                       container (libtessera_intercept.so)
//!  ---------------------                       -----------------------------------
//!  Grant::encode ----> grant   (read-only) --> Grant::parse        limits
//!  ledger::initial --> ledger  (read-write) <- LedgerPage atomics  use
//!  LedgerReport::parse <-- pread --------------+
//! ```
//!
//! * [`Grant`]: which GPU, how many bytes, which percent of its compute. One page, written by the
//!   host only, changed in place under a sequence number ([`GrantUpdate`]).
//! * [`LedgerPage`]: use by every process of the claim. Atomics only, so that no process can leave
//!   it locked. The host reads a copy of the bytes and assumes nothing about them
//!   ([`LedgerReport`]).
//! * [`host_pid`]: protocol by which a process gets its PID of the host, for its slot.
//! * [`mps`]: variables that make a process a client of MPS.
//!
//! Both have a magic number, an ABI version and their length. A library of another version refuses
//! the share and grants no memory. All numbers are little-endian; memory
//! is in bytes, compute in percent of a GPU, GPU time in nanoseconds. The reasons for this layout
//! are in `docs/adr/0010-grant-and-ledger-layout.md`.
#![no_std]
#![forbid(unsafe_code)]

pub mod compute;
mod grant;
pub mod host_pid;
pub mod ledger;
pub mod mps;
mod text;
mod uuid;

#[cfg(test)]
mod fuzz_tests;

pub use compute::{ComputePage, ComputeSlot, PublishedPage};
pub use grant::{
    ComputePolicy, GRANT_MPS, GRANT_OVERSUBSCRIBE, Grant, GrantError, GrantPage, GrantUpdate,
    grant_offset,
};
pub use ledger::{Busy, LedgerError, LedgerPage, LedgerReport, ProcessReport, SlotPage};
pub use text::{Text, TextError};
pub use uuid::{GpuUuid, UuidError};

/// Version of both layouts. A library and a driver with different versions do not work together: no
/// memory is granted.
pub const ABI_VERSION: u32 = 1;

/// Length of a grant file in bytes: one page, so that a later version can add fields without a
/// longer mapping.
pub const GRANT_LEN: usize = 4096;

/// Length of a ledger file in bytes, and the `size=` of the tmpfs that holds it: a whole number of
/// 4 KiB pages.
pub const LEDGER_LEN: usize = ledger::HEADER_LEN + ledger::SLOTS * ledger::SLOT_LEN;

/// `nr_inodes=` of the tmpfs of all grants of a node. It identifies a grant as the driver's:
/// volumes of pods define at most the size of a tmpfs, and the kernel then sets half as many inodes
/// as the machine has pages. A prime, which no memory size yields; enough for some 16,000 shares.
pub const GRANTS_TMPFS_INODES: u64 = 65_521;

/// `nr_inodes=` of the tmpfs of one ledger, which identifies it likewise: its root and the ledger.
pub const LEDGER_TMPFS_INODES: u64 = 2;

/// The largest memory limit of a grant, in bytes (8 TiB less one): the ledger counts in 43
/// bits.
pub const MAX_MEMORY_BYTES: u64 = ledger::Total::MAX_USED;

/// Directory of a container's shares: `/dev/tessera/<id>/{grant,ledger}`.
pub const SHARES_DIR: &str = "/dev/tessera";

/// Directory of the driver's socket in a container, below [`SHARES_DIR`]. It is no share: names of
/// shares have dashes. The directory is mounted, so that a restarted driver is found in it.
pub const HOST_DIR: &str = "/dev/tessera/host";

/// The name of the grant in a share's directory.
pub const GRANT_FILE: &str = "grant";

/// The name of the ledger in a share's directory.
pub const LEDGER_FILE: &str = "ledger";
