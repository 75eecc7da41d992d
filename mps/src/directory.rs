//! The directory of a daemon: made before it starts, tidied up before it starts again, removed when
//! nobody wants it.

use std::{
    fs::{self, DirEntry, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use rustix::mount::MountFlags;
use tessera_api::names::GpuUuid;
use tessera_runtime::error_chain::chain;

use crate::{
    shm::{self, ShmSize},
    tmpfs,
};
use tessera_mps_protocol::layout::{MpsPaths, gpu_named};

/// A handful of sockets and files. Tenants have it to write to, and may be root in their
/// containers: more than this they cannot make.
const PIPE: &str = "size=1m,nr_inodes=256,mode=0755";

/// Of a daemon that has much to say, the end is lost.
const LOG: &str = "size=16m,nr_inodes=256,mode=0755";

/// Why a directory is not as it is to be.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The keeper lacks privileges.
    #[error("not allowed to mount a tmpfs at `{path}`: the keeper needs `privileged: true` in its securityContext", path = .path.display())]
    MayNotMount {
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The operating system said no.
    #[error("failed to {operation} `{path}`", path = .path.display())]
    Io {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

/// Makes what is missing of a GPU's; what is there keeps its inodes.
pub(crate) fn make(
    paths: &MpsPaths,
    gpu: &GpuUuid,
    shm_size: ShmSize,
) -> Result<(), DirectoryError> {
    // A server runs as the user of its clients, if told so, and goes through all of them:
    // bottlerocket-os/bottlerocket#4673.
    pass_through(paths.root().parent().unwrap_or(Path::new("/")))?;
    let (pipe, log, shm) = (paths.pipe(gpu), paths.log(gpu), paths.shm(gpu));
    for directory in [paths.root(), &paths.daemons(), &paths.daemon(gpu)] {
        make_one(directory)?;
    }
    // The daemon writes there as root: a tenant's link is not to lead it elsewhere.
    mount(&pipe, |pipe| tmpfs::mount(pipe, PIPE, MountFlags::NOSYMFOLLOW))?;
    mount(&log, |log| tmpfs::mount(log, LOG, MountFlags::empty()))?;
    mount(&shm, |shm| shm::mount(shm, shm_size))?;
    [pipe, log].iter().try_for_each(|directory| open_up(directory))
}

fn mount(target: &Path, mount: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), DirectoryError> {
    fs::create_dir_all(target).map_err(failed("create", target))?;
    let path = target.to_owned();
    mount(target).map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => DirectoryError::MayNotMount { path, source },
        _ => DirectoryError::Io { operation: "mount a tmpfs at", path, source },
    })
}

fn make_one(directory: &Path) -> Result<(), DirectoryError> {
    fs::create_dir_all(directory).map_err(failed("create", directory))?;
    open_up(directory)
}

/// The umask may have taken bits away, or a tenant that is root.
fn open_up(directory: &Path) -> Result<(), DirectoryError> {
    fs::set_permissions(directory, Permissions::from_mode(0o755))
        .map_err(failed("open up", directory))
}

/// Lets everybody through the state directory, which is tessera-driver's; nothing else of it
/// changes.
fn pass_through(state_dir: &Path) -> Result<(), DirectoryError> {
    let mode = fs::metadata(state_dir).map_err(failed("look at", state_dir))?.permissions().mode();
    if mode & 0o111 == 0o111 {
        return Ok(());
    }
    fs::set_permissions(state_dir, Permissions::from_mode(mode | 0o111))
        .map_err(failed("open up", state_dir))
}

/// Removes what a daemon that is dead has left in its pipe directory: it would keep the next from
/// starting, or others waiting for it. What cannot be removed stays, for it may be a tenant's:
/// whether it matters is the daemon's to say.
pub(crate) fn tidy(paths: &MpsPaths, gpu: &GpuUuid) -> Result<(), DirectoryError> {
    let pipe = paths.pipe(gpu);
    for entry in fs::read_dir(&pipe).map_err(failed("list", &pipe))? {
        let entry = entry.map_err(failed("list", &pipe))?;
        if let Err(error) = remove_stale(&entry) {
            tracing::warn!(%gpu, error = %chain(&error), "a file of an earlier MPS daemon stays");
        }
    }
    Ok(())
}

/// Nobody serves sockets, FIFOs and files any more. The daemon makes no directories: those are a
/// tenant's, and may be as deep as it likes.
fn remove_stale(entry: &DirEntry) -> Result<(), DirectoryError> {
    let path = entry.path();
    if entry.file_type().map_err(failed("look at", &path))?.is_dir() {
        return Ok(());
    }
    fs::remove_file(&path).map_err(failed("remove", &path))
}

/// Unmounts and removes all of a GPU's.
pub(crate) fn remove(paths: &MpsPaths, gpu: &GpuUuid) -> Result<(), DirectoryError> {
    // First, and with certainty: what is in them is the tenants'. What is left after that is the
    // keeper's own.
    for target in [paths.pipe(gpu), paths.log(gpu), paths.shm(gpu)] {
        tmpfs::unmount(&target).map_err(failed("unmount", &target))?;
    }
    let directory = paths.daemon(gpu);
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(failed("remove", &directory)),
    }
}

/// GPUs that have a directory.
pub(crate) fn list(paths: &MpsPaths) -> Result<Vec<GpuUuid>, DirectoryError> {
    let daemons = paths.daemons();
    let entries = match fs::read_dir(&daemons) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed("list", &daemons))?,
    };
    let names: Result<Vec<_>, _> =
        entries.map(|entry| entry.map(|entry| entry.file_name())).collect();
    Ok(names.map_err(failed("list", &daemons))?.iter().filter_map(|name| gpu_named(name)).collect())
}

fn failed(
    operation: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> DirectoryError + use<> {
    let path = path.to_owned();
    move |source| DirectoryError::Io { operation, path, source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use super::*;

    #[test]
    fn what_a_dead_daemon_has_left_is_removed_and_directories_are_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        let gpu = GpuUuid::new("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID");
        let pipe = paths.pipe(&gpu);
        fs::create_dir_all(pipe.join("x.pid/y/z")).expect("made");
        drop(UnixListener::bind(pipe.join("control")).expect("bound"));
        fs::write(pipe.join("nvidia-cuda-mps-control.pid"), "1").expect("written");
        symlink("x.pid", pipe.join("link")).expect("made");
        tidy(&paths, &gpu).expect("tidy");
        let left: Vec<_> = fs::read_dir(&pipe)
            .expect("there")
            .map(|entry| entry.expect("readable").file_name())
            .collect();
        assert_eq!(left, ["x.pid"]);
        assert!(pipe.join("x.pid/y/z").exists());
    }
}
