//! What this node remembers and hands to containers: all of it below `--state-dir`, on tmpfs.
//!
//! ```text
//! <state-dir>/journal.json                          what is prepared         journal
//! <state-dir>/journal.lock                          shared by instances
//! <state-dir>/arbitration.lock                      held by the instance that shares compute out
//! <state-dir>/asked/<claim>                         a Prepare is under way              attempts
//! <state-dir>/grants/<claim>/<id>/grant             what may be taken        shares; `grants` is a tmpfs of its own
//! <state-dir>/ledgers/<claim>/<id>/ledger           what is taken; `<id>` is a tmpfs of its own
//! <state-dir>/lib/<sha256>/libtessera_intercept*.so  who enforces it         library
//! <state-dir>/ld.so.preload
//! <state-dir>/host/pid.sock                         who asks what the host calls it  host_pids
//! <state-dir>/host.lock                             held while an instance takes that name
//! ```
//!
//! After a reboot all of it is gone, as are the containers and the CDI specs: the kubelet prepares
//! anew. So nothing here is synced to a disk, and no boot id is kept.

pub mod attempts;
pub mod journal;
pub mod library;
pub mod mounts;
pub mod shares;
pub mod sole_lock;

use std::path::{Path, PathBuf};

use tessera_api::names::{ClaimDeviceName, ClaimUid};

/// Where things are below the state directory.
#[derive(Clone, Debug)]
pub struct StatePaths {
    root: PathBuf,
}

impl StatePaths {
    /// The layout below `root`.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The state directory itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The journal.
    #[must_use]
    pub fn journal(&self) -> PathBuf {
        self.root.join("journal.json")
    }

    /// The lock on the journal and on everything that it describes. Never removed: a lock on an
    /// unlinked file excludes nobody.
    #[must_use]
    pub fn journal_lock(&self) -> PathBuf {
        self.root.join("journal.lock")
    }

    /// The lock of the instance that says how compute is shared. Never removed, as the journal's.
    #[must_use]
    pub fn arbitration_lock(&self) -> PathBuf {
        self.root.join("arbitration.lock")
    }

    /// Prepares under way.
    #[must_use]
    pub fn asked(&self) -> PathBuf {
        self.root.join("asked")
    }

    /// Grants of all claims.
    #[must_use]
    pub fn grants(&self) -> PathBuf {
        self.root.join("grants")
    }

    /// Ledgers of all claims.
    #[must_use]
    pub fn ledgers(&self) -> PathBuf {
        self.root.join("ledgers")
    }

    /// Grants of one claim.
    #[must_use]
    pub fn claim_grants(&self, claim: &ClaimUid) -> PathBuf {
        self.grants().join(claim.as_str())
    }

    /// Ledgers of one claim.
    #[must_use]
    pub fn claim_ledgers(&self, claim: &ClaimUid) -> PathBuf {
        self.ledgers().join(claim.as_str())
    }

    /// The grant of one share.
    #[must_use]
    pub fn grant(&self, share: &ClaimDeviceName) -> PathBuf {
        self.claim_grants(share.claim())
            .join(share.to_string())
            .join(tessera_intercept_abi::GRANT_FILE)
    }

    /// The mount point of one share's ledger.
    #[must_use]
    pub fn ledger_mount(&self, share: &ClaimDeviceName) -> PathBuf {
        self.claim_ledgers(share.claim()).join(share.to_string())
    }

    /// The ledger of one share.
    #[must_use]
    pub fn ledger(&self, share: &ClaimDeviceName) -> PathBuf {
        self.ledger_mount(share).join(tessera_intercept_abi::LEDGER_FILE)
    }

    /// Interceptor libraries, by hash.
    #[must_use]
    pub fn libraries(&self) -> PathBuf {
        self.root.join("lib")
    }

    /// The directory that containers get, read-only, with the driver's socket.
    #[must_use]
    pub fn host(&self) -> PathBuf {
        self.root.join("host")
    }

    /// The lock of the instance that takes the socket's name. Outside of what containers see: they
    /// could hold it.
    #[must_use]
    pub fn host_lock(&self) -> PathBuf {
        self.root.join("host.lock")
    }

    /// The file that containers get as `/etc/ld.so.preload`.
    #[must_use]
    pub fn preload(&self) -> PathBuf {
        self.root.join("ld.so.preload")
    }
}
