//! On-disk node state: journal, grants, ledgers and installed libraries, below `--state-dir` on a
//! tmpfs.
//!
//! ```text
//! <state-dir>/journal.json                           prepared claims (journal)
//! <state-dir>/journal.lock                           lock of all instances
//! <state-dir>/arbitration.lock                       held by the instance that schedules compute
//! <state-dir>/measurement.lock                       held by the instance that measures shares
//! <state-dir>/asked/<claim>                          a Prepare under way (attempts)
//! <state-dir>/grants/<claim>/<id>/grant              limits of a share (shares), on a tmpfs
//! <state-dir>/ledgers/<claim>/<id>/ledger            usage of a share, each on a tmpfs
//! <state-dir>/lib/<sha256>/libtessera_intercept*.so  interceptor (library)
//! <state-dir>/ld.so.preload                          list of preloaded libraries
//! <state-dir>/host/pid.sock                          socket of the PID server (host_pids)
//! <state-dir>/host.lock                              held while an instance takes that name
//! ```
//!
//! A reboot removes all of it, as it does the containers and the CDI specs, and the kubelet
//! prepares claims again. So no file is synced to a disk, and no boot id is stored.

pub mod attempts;
pub mod journal;
pub mod library;
pub mod mounts;
pub mod shares;
pub mod sole_lock;

use std::path::{Path, PathBuf};

use tessera_api::names::{ClaimDeviceName, ClaimUid};

/// Layout of the state directory.
#[derive(Clone, Debug)]
pub struct StatePaths {
    root: PathBuf,
}

impl StatePaths {
    /// Returns the layout below `root`.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the state directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of the journal.
    #[must_use]
    pub fn journal(&self) -> PathBuf {
        self.root.join("journal.json")
    }

    /// Returns the path of the lock on the journal and the files that it describes. The file is
    /// never removed: a lock on an unlinked file excludes no other instance.
    #[must_use]
    pub fn journal_lock(&self) -> PathBuf {
        self.root.join("journal.lock")
    }

    /// Returns the path of the lock of the instance that schedules compute. Never removed.
    #[must_use]
    pub fn arbitration_lock(&self) -> PathBuf {
        self.root.join("arbitration.lock")
    }

    /// Returns the path of the lock of the instance that measures shares. Never removed.
    #[must_use]
    pub fn measurement_lock(&self) -> PathBuf {
        self.root.join("measurement.lock")
    }

    /// Returns the directory of Prepares under way.
    #[must_use]
    pub fn asked(&self) -> PathBuf {
        self.root.join("asked")
    }

    /// Returns the directory of all grants.
    #[must_use]
    pub fn grants(&self) -> PathBuf {
        self.root.join("grants")
    }

    /// Returns the directory of all ledgers.
    #[must_use]
    pub fn ledgers(&self) -> PathBuf {
        self.root.join("ledgers")
    }

    /// Returns the directory of a claim's grants.
    #[must_use]
    pub fn claim_grants(&self, claim: &ClaimUid) -> PathBuf {
        self.grants().join(claim.as_str())
    }

    /// Returns the directory of a claim's ledgers.
    #[must_use]
    pub fn claim_ledgers(&self, claim: &ClaimUid) -> PathBuf {
        self.ledgers().join(claim.as_str())
    }

    /// Returns the path of a share's grant.
    #[must_use]
    pub fn grant(&self, share: &ClaimDeviceName) -> PathBuf {
        self.claim_grants(share.claim())
            .join(share.to_string())
            .join(tessera_intercept_abi::GRANT_FILE)
    }

    /// Returns the mount point of a share's ledger.
    #[must_use]
    pub fn ledger_mount(&self, share: &ClaimDeviceName) -> PathBuf {
        self.claim_ledgers(share.claim()).join(share.to_string())
    }

    /// Returns the path of a share's ledger.
    #[must_use]
    pub fn ledger(&self, share: &ClaimDeviceName) -> PathBuf {
        self.ledger_mount(share).join(tessera_intercept_abi::LEDGER_FILE)
    }

    /// Returns the directory of interceptor libraries, by hash.
    #[must_use]
    pub fn libraries(&self) -> PathBuf {
        self.root.join("lib")
    }

    /// Returns the directory of the PID server's socket, which containers get read-only.
    #[must_use]
    pub fn host(&self) -> PathBuf {
        self.root.join("host")
    }

    /// Returns the path of the lock of the instance that takes the name of that socket. It is
    /// outside of the directory that containers get, since they could hold it.
    #[must_use]
    pub fn host_lock(&self) -> PathBuf {
        self.root.join("host.lock")
    }

    /// Returns the path of the file that containers get as `/etc/ld.so.preload`.
    #[must_use]
    pub fn preload(&self) -> PathBuf {
        self.root.join("ld.so.preload")
    }
}
