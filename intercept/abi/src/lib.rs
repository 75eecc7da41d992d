//! The two files a container gets with every share of a GPU, byte for byte; and the one thing that
//! it can ask the host.
//!
//! ```text
//!  host (tessera-driver)                       container (libtessera_intercept.so)
//!  ---------------------                       -----------------------------------
//!  Grant::encode ----> grant   (read-only) --> Grant::parse        what may be taken
//!  ledger::initial --> ledger  (read-write) <- LedgerPage atomics  what is taken
//!  LedgerReport::parse <-- pread --------------+
//! ```
//!
//! * [`Grant`]: which GPU, how many bytes, which percent of its compute. One page, written by the
//!   host only, changed in place under a sequence number ([`GrantUpdate`]).
//! * [`LedgerPage`]: what every process of the claim has taken. Atomics only, so that no process
//!   can leave it locked. The host reads a copy of the bytes and believes nothing in it
//!   ([`LedgerReport`]).
//! * [`host_pid`]: how a process learns what the host calls it, for its slot.
//! * [`mps`]: how a process is told to share its GPU by MPS.
//!
//! Both carry a magic number, an ABI version and their length. A library that meets another version
//! refuses the share and gives no memory; it never guesses. All numbers are little-endian; memory
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

/// The version of both layouts. A library and a driver that differ here do not work together: no
/// memory is given.
pub const ABI_VERSION: u32 = 1;

/// Length of a grant file in bytes: one page, so that a later version can add fields without a
/// longer mapping.
pub const GRANT_LEN: usize = 4096;

/// Length of a ledger file in bytes, and the `size=` of the tmpfs that holds it: a whole number of
/// 4 KiB pages.
pub const LEDGER_LEN: usize = ledger::HEADER_LEN + ledger::SLOTS * ledger::SLOT_LEN;

/// `nr_inodes=` of the tmpfs that holds all grants of a node, by which a grant is known to be the
/// driver's own: whatever makes volumes for pods gives a tmpfs a size at most, and the kernel then
/// half as many inodes as the machine has pages. A prime, so that no machine's memory makes it;
/// enough for some 16,000 shares.
pub const GRANTS_TMPFS_INODES: u64 = 65_521;

/// `nr_inodes=` of the tmpfs that holds one ledger, by which it is known likewise: its root and the
/// ledger.
pub const LEDGER_TMPFS_INODES: u64 = 2;

/// The largest memory limit a grant can carry, in bytes (8 TiB less one): the ledger counts in 43
/// bits.
pub const MAX_MEMORY_BYTES: u64 = ledger::Total::MAX_USED;

/// Where the shares of a container are: `/dev/tessera/<id>/{grant,ledger}`.
pub const SHARES_DIR: &str = "/dev/tessera";

/// Where a container finds the host's driver: a directory below [`SHARES_DIR`] that is no share:
/// their names have dashes. The directory is what is mounted, so that a driver that starts anew is
/// found in it.
pub const HOST_DIR: &str = "/dev/tessera/host";

/// The name of the grant in a share's directory.
pub const GRANT_FILE: &str = "grant";

/// The name of the ledger in a share's directory.
pub const LEDGER_FILE: &str = "ledger";
