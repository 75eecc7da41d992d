//! Recorded mounts, which need no privilege.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use tessera_driver::state::mounts::{Mounts, Tmpfs};

/// Recorded mounts. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct RecordedMounts {
    mounted: Arc<Mutex<BTreeMap<PathBuf, Tmpfs>>>,
    refuses: Arc<AtomicBool>,
}

impl RecordedMounts {
    /// Returns the mounts by target.
    pub fn all(&self) -> BTreeMap<PathBuf, Tmpfs> {
        self.mounted.lock().expect("no panic").clone()
    }

    /// Sets whether unmounting fails.
    pub fn refuse_unmounts(&self, refuse: bool) {
        self.refuses.store(refuse, Ordering::SeqCst);
    }
}

impl Mounts for RecordedMounts {
    fn mount_tmpfs(&self, target: &Path, tmpfs: Tmpfs) -> io::Result<()> {
        if !target.is_dir() {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.mounted.lock().expect("no panic").insert(target.to_owned(), tmpfs);
        Ok(())
    }

    fn unmount(&self, target: &Path) -> io::Result<()> {
        if self.refuses.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let removed = self.mounted.lock().expect("no panic").remove(target);
        removed.map(drop).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    fn is_mounted(&self, target: &Path) -> io::Result<bool> {
        Ok(self.mounted.lock().expect("no panic").contains_key(target))
    }

    fn forbids_execution(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }
}
