//! Mounts of the operating system, behind a trait.

use std::{ffi::CString, io, path::Path};

use rustix::{
    fs::{AtFlags, CWD, StatVfsMountFlags, StatxAttributes, StatxFlags},
    mount::{MountFlags, UnmountFlags},
};

/// A tmpfs to mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tmpfs {
    /// Size in bytes: a whole number of pages.
    pub size_bytes: u64,
    /// Number of files and directories, its root included.
    pub inodes: u64,
    /// True if programs and libraries may be loaded from it.
    pub executable: bool,
}

/// Operations on mounts.
pub trait Mounts: Send + Sync + 'static {
    /// Mounts a new tmpfs at the directory `target`, with `nosuid` and `nodev`.
    ///
    /// # Errors
    /// The error of mount(2); `EPERM` if the process may not mount.
    fn mount_tmpfs(&self, target: &Path, tmpfs: Tmpfs) -> io::Result<()>;

    /// Detaches the mount at `target`. Containers that have it keep it until they end.
    ///
    /// # Errors
    /// The error of umount(2); `EINVAL` if nothing is mounted.
    fn unmount(&self, target: &Path) -> io::Result<()>;

    /// Returns true if `target` is a mount point, and false if it does not exist.
    ///
    /// # Errors
    /// The error of statx(2).
    fn is_mounted(&self, target: &Path) -> io::Result<bool>;

    /// Returns true if the file system of `target` is mounted with `noexec`.
    ///
    /// # Errors
    /// The error of statvfs(3).
    fn forbids_execution(&self, target: &Path) -> io::Result<bool>;
}

/// The mounts of the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelMounts;

impl Mounts for KernelMounts {
    fn mount_tmpfs(&self, target: &Path, tmpfs: Tmpfs) -> io::Result<()> {
        let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
        if !tmpfs.executable {
            flags |= MountFlags::NOEXEC;
        }
        let options = format!("size={},nr_inodes={},mode=0755", tmpfs.size_bytes, tmpfs.inodes);
        let options = CString::new(options).expect("invariant: numbers hold no NUL");
        Ok(rustix::mount::mount("tessera", target, "tmpfs", flags, options.as_c_str())?)
    }

    fn unmount(&self, target: &Path) -> io::Result<()> {
        // Detached: a plain unmount fails with EBUSY while a container has a file of it mounted,
        // which keeps the file system alive.
        Ok(rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?)
    }

    fn is_mounted(&self, target: &Path) -> io::Result<bool> {
        match rustix::fs::statx(CWD, target, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE) {
            Ok(stat) => Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn forbids_execution(&self, target: &Path) -> io::Result<bool> {
        Ok(rustix::fs::statvfs(target)?.f_flag.contains(StatVfsMountFlags::NOEXEC))
    }
}
