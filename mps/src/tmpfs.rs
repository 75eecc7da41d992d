//! tmpfs mounts of a daemon.
//!
//! Each directory that tenants or the daemon write to is a tmpfs of its own. Writers can fill only
//! that tmpfs, and unmounting removes their files without a recursive walk. The daemon writes there
//! as root of the node: a tenant's symbolic link must not redirect its writes.

use std::{ffi::CString, io, path::Path};

use rustix::{
    fs::{AtFlags, CWD, Statx, StatxAttributes, StatxFlags},
    io::Errno,
    mount::{MountFlags, UnmountFlags},
};

/// Mounts a tmpfs with `options`, unless one is mounted already.
///
/// # Errors
/// Returns the error of the kernel; `EPERM` if the process may not mount.
pub(crate) fn mount(target: &Path, options: &str) -> io::Result<()> {
    if is_mounted(target)? {
        return Ok(());
    }
    let options = CString::new(options)?;
    let flags =
        MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOSYMFOLLOW;
    Ok(rustix::mount::mount("tessera-mps", target, "tmpfs", flags, options.as_c_str())?)
}

/// Detaches the tmpfs. Containers that have it mounted keep it until they exit.
///
/// # Errors
/// Returns the error of the kernel.
pub(crate) fn unmount(target: &Path) -> io::Result<()> {
    while is_mounted(target)? {
        rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
    }
    Ok(())
}

fn is_mounted(target: &Path) -> io::Result<bool> {
    match rustix::fs::statx(CWD, target, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE) {
        Ok(stat) => is_mount_root(&stat),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns true if the path is the root of a mount, and an error if the kernel does not report it.
///
/// Reading that as "no" would stack one more mount at each call.
fn is_mount_root(stat: &Statx) -> io::Result<bool> {
    if !stat.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) {
        let needed = "cannot detect mounts: STATX_ATTR_MOUNT_ROOT needs Linux 5.8 or newer";
        return Err(io::Error::new(io::ErrorKind::Unsupported, needed));
    }
    Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fails_on_kernel_without_mount_root_attribute() {
        let mut stat =
            rustix::fs::statx(CWD, "/", AtFlags::empty(), StatxFlags::TYPE).expect("there");
        let mut is_root = |mask, attributes| {
            (stat.stx_attributes_mask, stat.stx_attributes) = (mask, attributes);
            is_mount_root(&stat)
        };
        let (root, none) = (StatxAttributes::MOUNT_ROOT, StatxAttributes::empty());
        assert!(is_root(root, root).expect("reported"));
        assert!(!is_root(root, none).expect("reported"));
        let error = is_root(none, none).expect_err("not reported");
        assert!(error.to_string().contains("Linux 5.8"), "{error}");
    }
}
