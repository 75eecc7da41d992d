//! Mounting, at the edge to the operating system.

use std::{ffi::CString, io, path::Path};

use rustix::{
    fs::{AtFlags, CWD, StatVfsMountFlags, StatxAttributes, StatxFlags},
    mount::{MountFlags, UnmountFlags},
};

/// A tmpfs to mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tmpfs {
    /// How much it holds, in bytes: a whole number of pages.
    pub size_bytes: u64,
    /// How many files and directories, its root included.
    pub inodes: u64,
    /// Whether programs and libraries may be loaded from it.
    pub executable: bool,
}

/// What the driver does with mounts.
pub trait Mounts: Send + Sync + 'static {
    /// Mounts a new tmpfs at the directory `target`. Set-user-id bits and device nodes on it mean
    /// nothing.
    ///
    /// # Errors
    /// What the kernel says; `EPERM` where the process may not mount.
    fn mount_tmpfs(&self, target: &Path, tmpfs: Tmpfs) -> io::Result<()>;

    /// Detaches what is mounted at `target`. Containers that have it keep it until they end.
    ///
    /// # Errors
    /// What the kernel says; `EINVAL` where nothing is mounted.
    fn unmount(&self, target: &Path) -> io::Result<()>;

    /// Whether something is mounted at `target`; `false` where there is no `target`.
    ///
    /// # Errors
    /// What the kernel says.
    fn is_mounted(&self, target: &Path) -> io::Result<bool>;

    /// Whether the file system of `target` forbids to load programs and libraries from it.
    ///
    /// # Errors
    /// What the kernel says.
    fn forbids_execution(&self, target: &Path) -> io::Result<bool>;
}

/// The kernel's own.
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
        // Detached, since a container that still has it would make a plain unmount fail as busy:
        // its own mount of the file keeps the file system alive.
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
