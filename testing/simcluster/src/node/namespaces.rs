//! Namespaces for processes, with and without root.
//!
//! Entering them is done by thread and, for user namespaces, only while a process has a single one.
//! So whoever wants them runs this crate's own program again with a subcommand, which calls
//! [`enter`] first thing.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::process::{getegid, geteuid};
use rustix::thread::UnshareFlags;

/// The subcommand that runs [`try_out`].
pub const TRY_OUT: &str = "namespaces-try-out";

/// Leaves the current mount namespace, and enters what else `flags` name. Without root, in a user
/// namespace in which the caller is root. Mounts made from here on are seen by nobody outside.
///
/// # Errors
/// The kernel, or a policy on top of it, does not allow that.
pub fn enter(flags: UnshareFlags) -> io::Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    if uid.is_root() {
        unshare(flags | UnshareFlags::NEWNS)?;
    } else {
        unshare(flags | UnshareFlags::NEWNS | UnshareFlags::NEWUSER)?;
        map(0, uid.as_raw(), 0, gid.as_raw())?;
    }
    // Unmounts outside still reach this namespace.
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
    reason = "its replacement is unsafe for the sake of CLONE_FILES, which nobody here asks for"
)]
pub(crate) fn unshare(flags: UnshareFlags) -> io::Result<()> {
    rustix::thread::unshare(flags).map_err(io::Error::from)
}

/// Whether namespaces and mounts are to be had here; `program` is `tessera-simcluster`.
///
/// # Errors
/// They are not, and this says why.
pub fn allowed(program: &Path) -> io::Result<()> {
    let output = Command::new(program).arg(TRY_OUT).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let reason = said.trim().trim_start_matches("tessera-simcluster: ");
    Err(io::Error::other(reason.to_owned()))
}

/// Enters all namespaces that are needed and mounts a tmpfs in them; for a process that does
/// nothing else.
///
/// # Errors
/// The first step that is not allowed.
pub fn try_out() -> io::Result<()> {
    enter(UnshareFlags::NEWPID | UnshareFlags::NEWUTS | UnshareFlags::NEWIPC)?;
    mount("tmpfs", "/tmp", "tmpfs", MountFlags::empty(), None)?;
    Ok(())
}
