//! Directories of a daemon: created before it starts, cleaned before a restart, removed when it is
//! no longer used.

use std::{
    fs::{self, DirEntry, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use tessera_api::names::GpuUuid;
use tessera_runtime::error_chain::chain;

use crate::{
    shm::{self, ShmSize},
    tmpfs,
};
use tessera_mps_protocol::layout::{MpsPaths, gpu_named};

/// Size of the pipe directory, which has a handful of sockets and files. Tenants can write there
/// and may be root in their containers; they cannot exceed this size.
const PIPE_OPTIONS: &str = "size=1m,nr_inodes=256,mode=0755";

/// Size of the log directory. Longer logs lose their end.
const LOG_OPTIONS: &str = "size=16m,nr_inodes=256,mode=0755";

/// Error of an operation on a daemon's directory.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// The supervisor lacks privileges.
    #[error("permission denied to mount a tmpfs at `{path}`: tessera-mps needs `privileged: true` in its securityContext", path = .path.display())]
    MayNotMount {
        /// Mount point.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A file system operation failed.
    #[error("cannot {operation} `{path}`", path = .path.display())]
    Io {
        /// Operation that failed.
        operation: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Creates the missing directories of a GPU; existing ones keep their inodes.
pub(crate) fn create_all(
    paths: &MpsPaths,
    gpu: &GpuUuid,
    shm_size: ShmSize,
) -> Result<(), DirectoryError> {
    // A server may run as the user of its clients and needs search permission on all parents:
    // bottlerocket-os/bottlerocket#4673.
    allow_traversal(paths.root().parent().unwrap_or(Path::new("/")))?;
    let (pipe, log, shm) = (paths.pipe(gpu), paths.log(gpu), paths.shm(gpu));
    for directory in [paths.root(), &paths.daemons(), &paths.daemon(gpu)] {
        create(directory)?;
    }
    mount(&pipe, |pipe| tmpfs::mount(pipe, PIPE_OPTIONS))?;
    mount(&log, |log| tmpfs::mount(log, LOG_OPTIONS))?;
    mount(&shm, |shm| shm::mount(shm, shm_size))?;
    [pipe, log].iter().try_for_each(|directory| make_readable(directory))
}

fn mount(target: &Path, mount: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), DirectoryError> {
    fs::create_dir_all(target).map_err(failed("create", target))?;
    let path = target.to_owned();
    mount(target).map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => DirectoryError::MayNotMount { path, source },
        _ => DirectoryError::Io { operation: "mount a tmpfs at", path, source },
    })
}

fn create(directory: &Path) -> Result<(), DirectoryError> {
    fs::create_dir_all(directory).map_err(failed("create", directory))?;
    make_readable(directory)
}

/// Sets the mode, which the umask or a tenant that is root may have restricted.
fn make_readable(directory: &Path) -> Result<(), DirectoryError> {
    fs::set_permissions(directory, Permissions::from_mode(0o755))
        .map_err(failed("set the mode of", directory))
}

/// Adds search permission for all users to the state directory, which belongs to tessera-driver.
/// Nothing else of it changes.
fn allow_traversal(state_dir: &Path) -> Result<(), DirectoryError> {
    let mode = fs::metadata(state_dir)
        .map_err(failed("read the mode of", state_dir))?
        .permissions()
        .mode();
    if mode & 0o111 == 0o111 {
        return Ok(());
    }
    fs::set_permissions(state_dir, Permissions::from_mode(mode | 0o111))
        .map_err(failed("set the mode of", state_dir))
}

/// Removes files of an exited daemon from its pipe directory. They would block the next start or
/// make clients wait. Files that cannot be removed stay, since they may be a tenant's; the
/// daemon fails if they matter.
pub(crate) fn tidy(paths: &MpsPaths, gpu: &GpuUuid) -> Result<(), DirectoryError> {
    let pipe = paths.pipe(gpu);
    for entry in fs::read_dir(&pipe).map_err(failed("list", &pipe))? {
        let entry = entry.map_err(failed("list", &pipe))?;
        if let Err(error) = remove_stale(&entry) {
            tracing::warn!(%gpu, error = %chain(&error), "cannot remove file of previous MPS daemon");
        }
    }
    Ok(())
}

/// Removes a socket, FIFO or file. The daemon creates no directories: those are a tenant's, and may
/// be arbitrarily deep.
fn remove_stale(entry: &DirEntry) -> Result<(), DirectoryError> {
    let path = entry.path();
    if entry.file_type().map_err(failed("read the type of", &path))?.is_dir() {
        return Ok(());
    }
    fs::remove_file(&path).map_err(failed("remove", &path))
}

/// Unmounts and removes all directories of a GPU.
pub(crate) fn remove(paths: &MpsPaths, gpu: &GpuUuid) -> Result<(), DirectoryError> {
    // The mounts go first, because they have the tenants' files. The rest belongs to the
    // supervisor.
    for target in [paths.pipe(gpu), paths.log(gpu), paths.shm(gpu)] {
        tmpfs::unmount(&target).map_err(failed("unmount", &target))?;
    }
    let directory = paths.daemon(gpu);
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(failed("remove", &directory)),
    }
}

/// Returns the GPUs that have a directory.
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
    fn tidy_removes_stale_files_and_keeps_directories() {
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
