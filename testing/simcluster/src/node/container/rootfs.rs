//! The container's root file system on a tmpfs, and the last steps before its program runs.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, StatVfsMountFlags, statvfs};
use rustix::mount::{
    MountFlags, UnmountFlags, mount, mount_bind_recursive, mount_remount, unmount,
};
use rustix::process::umask;

use super::identity;
use super::spec::InitSpec;
use crate::node::namespaces;

/// A failed step of the setup.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A mount failed.
    #[error("cannot mount `{what}` at `{target}`")]
    Mount {
        /// Source of the mount.
        what: String,
        /// Path in the container.
        target: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A directory, file or link of the root could not be created.
    #[error("cannot create `{path}`")]
    Create {
        /// Path on this machine.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A target is relative or contains `..`.
    #[error("`{target}` is not an absolute path inside the container")]
    Target {
        /// The target.
        target: PathBuf,
    },
    /// The root could not be entered.
    #[error("cannot pivot to root `{root}`")]
    Pivot {
        /// The new root.
        root: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// User, capabilities or host name could not be set.
    #[error("cannot set {what}")]
    Identity {
        /// The setting.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// Neither the pod nor the image sets a command.
    #[error("no command specified")]
    NoCommand,
    /// The program does not start.
    #[error("cannot run `{program}`")]
    Exec {
        /// Name of the program.
        program: String,
        /// Cause.
        source: io::Error,
    },
}

/// Directories of the empty image.
const DIRECTORIES: [&str; 13] = [
    "usr/bin",
    "usr/sbin",
    "usr/lib",
    "usr/lib64",
    "usr/local/bin",
    "usr/local/lib",
    "etc",
    "proc",
    "dev",
    "tmp",
    "run",
    "root",
    "var",
];

/// Links of a merged `/usr`.
const LINKS: [(&str, &str); 5] = [
    ("bin", "usr/bin"),
    ("sbin", "usr/sbin"),
    ("lib", "usr/lib"),
    ("lib64", "usr/lib64"),
    ("var/run", "../run"),
];

/// Device nodes of every container.
const DEVICES: [&str; 5] = ["null", "zero", "full", "random", "urandom"];

/// Builds the root, enters it and becomes the container's program.
///
/// The calling process must be single-threaded and alone in new mount and pid namespaces.
///
/// # Errors
/// Returns the failed step; the process must exit then.
pub(crate) fn become_program(spec: &InitSpec) -> Result<Infallible, SetupError> {
    let root = &spec.root;
    // As in runc: the program may run as any user, and must be able to read what is created here.
    umask(Mode::WGRP | Mode::WOTH);
    mount_tmpfs(root, Path::new("/"), c"mode=755")?;
    lay_out(root)?;
    for file in &spec.files {
        bind(root, &file.source, &file.target, true)?;
    }
    mount_dev(root)?;
    mount_proc(root)?;
    for device in &spec.devices {
        bind(root, &device.source, &device.target, false)?;
    }
    for mount in &spec.mounts {
        bind(root, &mount.source, &mount.target, mount.read_only)?;
    }
    make_working_dir(root, &spec.working_dir)?;
    pivot(root)?;
    if spec.read_only_root {
        remount_read_only(Path::new("/")).map_err(|source| SetupError::Mount {
            what: "read-only root".into(),
            target: "/".into(),
            source,
        })?;
    }
    identity::set_hostname(&spec.hostname)?;
    identity::exec(spec)
}

fn mount_tmpfs(at: &Path, target: &Path, options: &std::ffi::CStr) -> Result<(), SetupError> {
    namespaces::mount_tmpfs(at, Some(options)).map_err(|source| SetupError::Mount {
        what: "tmpfs".into(),
        target: target.to_owned(),
        source,
    })
}

fn lay_out(root: &Path) -> Result<(), SetupError> {
    for directory in DIRECTORIES {
        create_dir(&root.join(directory))?;
    }
    for (link, to) in LINKS {
        let path = root.join(link);
        symlink(to, &path).map_err(|source| SetupError::Create { path, source })?;
    }
    let tmp = root.join("tmp");
    fs::set_permissions(&tmp, fs::Permissions::from_mode(0o1777))
        .map_err(|source| SetupError::Create { path: tmp, source })?;
    write(
        &root.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    )?;
    write(&root.join("etc/group"), "root:x:0:\nnogroup:x:65534:\n")?;
    write(&root.join("etc/nsswitch.conf"), "passwd: files\ngroup: files\nhosts: files\n")?;
    write(&root.join("etc/hosts"), "127.0.0.1 localhost\n")
}

fn mount_dev(root: &Path) -> Result<(), SetupError> {
    let dev = root.join("dev");
    mount_tmpfs(&dev, Path::new("/dev"), c"mode=755")?;
    for name in DEVICES {
        let path = Path::new("/dev").join(name);
        bind(root, &path, &path, false)?;
    }
    for (link, to) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        let path = dev.join(link);
        symlink(to, &path).map_err(|source| SetupError::Create { path, source })?;
    }
    create_dir(&dev.join("shm"))?;
    mount_tmpfs(&dev.join("shm"), Path::new("/dev/shm"), c"mode=1777")
}

/// Mounts a new proc. Inside a user namespace the kernel may refuse that, because parts of the
/// outer `/proc` are masked; the outer one is then mounted, where `/proc/self` still is the reader.
fn mount_proc(root: &Path) -> Result<(), SetupError> {
    let at = root.join("proc");
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    if mount("proc", &at, "proc", flags, None).is_ok() {
        return Ok(());
    }
    mount_bind_recursive("/proc", &at).map_err(|error| SetupError::Mount {
        what: "proc".into(),
        target: "/proc".into(),
        source: error.into(),
    })
}

/// Bind-mounts `source` at `target`, creating the mount point (a directory or an empty file).
fn bind(root: &Path, source: &Path, target: &Path, read_only: bool) -> Result<(), SetupError> {
    let failed = |error: io::Error| SetupError::Mount {
        what: source.display().to_string(),
        target: target.to_owned(),
        source: error,
    };
    let at = inside(root, target)?;
    let directory = fs::metadata(source).map_err(failed)?.is_dir();
    if !at.exists() {
        if directory {
            create_dir(&at)?;
        } else {
            create_dir(at.parent().unwrap_or(root))?;
            write(&at, "")?;
        }
    }
    mount_bind_recursive(source, &at).map_err(|error| failed(error.into()))?;
    if read_only { remount_read_only(&at).map_err(failed) } else { Ok(()) }
}

/// Returns `target` under `root`. Links of the root are relative and stay inside it, so joining is
/// enough.
fn inside(root: &Path, target: &Path) -> Result<PathBuf, SetupError> {
    let refused = || SetupError::Target { target: target.to_owned() };
    let relative = target.strip_prefix("/").map_err(|_| refused())?;
    if relative.components().all(|part| matches!(part, Component::Normal(_)))
        && relative != Path::new("")
    {
        Ok(root.join(relative))
    } else {
        Err(refused())
    }
}

/// Remounts read-only. Inside a user namespace the flags of outer mounts are locked, so they must
/// be repeated.
fn remount_read_only(at: &Path) -> io::Result<()> {
    let present = statvfs(at)?.f_flag;
    let mut flags = MountFlags::BIND | MountFlags::RDONLY;
    for (seen, keep) in [
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
    ] {
        if present.contains(seen) {
            flags |= keep;
        }
    }
    Ok(mount_remount(at, flags, c"")?)
}

fn make_working_dir(root: &Path, working_dir: &Path) -> Result<(), SetupError> {
    if working_dir == Path::new("/") { Ok(()) } else { create_dir(&inside(root, working_dir)?) }
}

/// Pivots as runc does: the old root is stacked on the new one and detached from there.
fn pivot(root: &Path) -> Result<(), SetupError> {
    let enter = || -> io::Result<()> {
        rustix::process::chdir(root)?;
        rustix::process::pivot_root(".", ".")?;
        unmount(".", UnmountFlags::DETACH)?;
        Ok(rustix::process::chdir("/")?)
    };
    enter().map_err(|source| SetupError::Pivot { root: root.to_owned(), source })
}

fn create_dir(path: &Path) -> Result<(), SetupError> {
    fs::create_dir_all(path).map_err(|source| SetupError::Create { path: path.to_owned(), source })
}

fn write(path: &Path, text: &str) -> Result<(), SetupError> {
    fs::write(path, text).map_err(|source| SetupError::Create { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_stays_inside_the_root() {
        let root = Path::new("/r");
        assert_eq!(
            inside(root, Path::new("/dev/tessera/a/grant")).unwrap(),
            Path::new("/r/dev/tessera/a/grant")
        );
        for bad in ["relative", "/a/../../etc", "/", ""] {
            assert!(
                matches!(inside(root, Path::new(bad)), Err(SetupError::Target { .. })),
                "{bad}"
            );
        }
    }
}
