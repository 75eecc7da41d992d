//! Namespaces for processes, with and without root.
//!
//! A thread enters namespaces for itself, and user namespaces only while its process has a single
//! thread. Therefore this crate's program is run again with a subcommand, which calls [`enter`]
//! first.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{getegid, geteuid};
use rustix::thread::UnshareFlags;

/// Subcommand that runs [`check`].
pub const CHECK: &str = "namespaces-try-out";

/// Leaves the current mount namespace and enters the namespaces in `flags`.
///
/// Without root, a user namespace is entered too, in which the caller is root. Later mounts are
/// invisible outside.
///
/// # Errors
/// Returns an error if the kernel or a security policy does not allow it.
pub fn enter(flags: UnshareFlags) -> io::Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    if uid.is_root() {
        unshare(flags | UnshareFlags::NEWNS)?;
    } else {
        unshare(flags | UnshareFlags::NEWNS | UnshareFlags::NEWUSER)?;
        map(0, uid.as_raw(), 0, gid.as_raw())?;
    }
    // Unmounts outside still propagate to this namespace.
    Ok(mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?)
}

/// Maps one user and one group of the new user namespace to ids of the outer one.
pub(crate) fn map(uid: u32, outer_uid: u32, gid: u32, outer_gid: u32) -> io::Result<()> {
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("{uid} {outer_uid} 1"))?;
    fs::write("/proc/self/gid_map", format!("{gid} {outer_gid} 1"))
}

#[expect(
    deprecated,
    reason = "its replacement is unsafe because of CLONE_FILES, which is not used here"
)]
pub(crate) fn unshare(flags: UnshareFlags) -> io::Result<()> {
    rustix::thread::unshare(flags).map_err(io::Error::from)
}

/// Mounts a tmpfs without set-user-ID programs and devices.
///
/// # Errors
/// Returns an error if the mount is not allowed.
pub fn mount_tmpfs(at: &Path, options: Option<&CStr>) -> io::Result<()> {
    Ok(mount("tmpfs", at, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, options)?)
}

/// Checks that namespaces and mounts are available; `program` is `tessera-simcluster`.
///
/// # Errors
/// Returns the reason if they are not available.
pub fn check_support(program: &Path) -> io::Result<()> {
    let output = Command::new(program).arg(CHECK).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let output = String::from_utf8_lossy(&output.stderr);
    let reason = output.trim().trim_start_matches("tessera-simcluster: ");
    Err(io::Error::other(reason.to_owned()))
}

/// Enters all required namespaces and mounts a tmpfs in them. The process must do nothing else.
///
/// # Errors
/// Returns the error of the first step that is not allowed.
pub fn check() -> io::Result<()> {
    enter(UnshareFlags::NEWPID | UnshareFlags::NEWUTS | UnshareFlags::NEWIPC)?;
    mount_tmpfs(Path::new("/tmp"), None)
}
