//! Directories of a daemon that tenants or the daemon write to: each a tmpfs of its own, so that
//! they fill nothing but that, and so that what they made there goes with it, without anybody
//! walking it.

use std::{ffi::CString, io, path::Path};

use rustix::{
    fs::{AtFlags, CWD, Statx, StatxAttributes, StatxFlags},
    io::Errno,
    mount::{MountFlags, UnmountFlags},
};

/// Mounts a tmpfs with such options, unless there is one.
///
/// # Errors
/// What the kernel says; `EPERM` where the process may not mount.
pub(crate) fn mount(target: &Path, options: &str, further: MountFlags) -> io::Result<()> {
    if is_mounted(target)? {
        return Ok(());
    }
    let options = CString::new(options)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | further;
    Ok(rustix::mount::mount("tessera-mps", target, "tmpfs", flags, options.as_c_str())?)
}

/// Detaches the tmpfs. Containers that have it keep it until they end.
///
/// # Errors
/// What the kernel says.
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

/// An error where the kernel does not know: whoever took that for no would mount another one over
/// it each time.
fn is_mount_root(stat: &Statx) -> io::Result<bool> {
    if !stat.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) {
        let needed =
            "the kernel does not say what is mounted (STATX_ATTR_MOUNT_ROOT): Linux 5.8 is needed";
        return Err(io::Error::new(io::ErrorKind::Unsupported, needed));
    }
    Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_does_not_say_what_is_mounted_is_an_error() {
        let mut stat =
            rustix::fs::statx(CWD, "/", AtFlags::empty(), StatxFlags::TYPE).expect("there");
        let mut says = |mask, attributes| {
            (stat.stx_attributes_mask, stat.stx_attributes) = (mask, attributes);
            is_mount_root(&stat)
        };
        let (root, none) = (StatxAttributes::MOUNT_ROOT, StatxAttributes::empty());
        assert!(says(root, root).expect("it says so"));
        assert!(!says(root, none).expect("it says so"));
        let error = says(none, none).expect_err("it does not say");
        assert!(error.to_string().contains("Linux 5.8"), "{error}");
    }
}
