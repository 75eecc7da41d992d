//! The directory of a daemon: made before it starts, tidied up before it starts again, removed when nobody wants it.

use std::{
    ffi::OsStr,
    fs::{self, FileType, Permissions},
    io,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
};

use tessera_api::names::GpuUuid;

use crate::{
    layout::{MpsPaths, gpu_named},
    shm::{self, ShmSize},
};

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
pub(crate) fn make(paths: &MpsPaths, gpu: &GpuUuid, shm_size: ShmSize) -> Result<(), DirectoryError> {
    // A server runs as the user of its clients, if told so, and goes through all of them: bottlerocket-os/bottlerocket#4673.
    pass_through(paths.root().parent().unwrap_or(Path::new("/")))?;
    let shm = paths.shm(gpu);
    for directory in [paths.root(), &paths.daemons(), &paths.daemon(gpu), &paths.pipe(gpu), &paths.log(gpu)] {
        make_one(directory)?;
    }
    fs::create_dir_all(&shm).map_err(failed("create", &shm))?;
    shm::mount(&shm, shm_size).map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => DirectoryError::MayNotMount { path: shm, source },
        _ => DirectoryError::Io { operation: "mount a tmpfs at", path: shm, source },
    })
}

fn make_one(directory: &Path) -> Result<(), DirectoryError> {
    fs::create_dir_all(directory).map_err(failed("create", directory))?;
    // The umask may have taken bits away.
    fs::set_permissions(directory, Permissions::from_mode(0o755)).map_err(failed("open up", directory))
}

/// Lets everybody through the state directory, which is tessera-driver's; nothing else of it changes.
fn pass_through(state_dir: &Path) -> Result<(), DirectoryError> {
    let mode = fs::metadata(state_dir).map_err(failed("look at", state_dir))?.permissions().mode();
    if mode & 0o111 == 0o111 {
        return Ok(());
    }
    fs::set_permissions(state_dir, Permissions::from_mode(mode | 0o111)).map_err(failed("open up", state_dir))
}

/// Removes what a daemon that is dead has left in its pipe directory: it would keep the next from starting, or others waiting for it.
pub(crate) fn tidy(paths: &MpsPaths, gpu: &GpuUuid) -> Result<(), DirectoryError> {
    let pipe = paths.pipe(gpu);
    for entry in fs::read_dir(&pipe).map_err(failed("list", &pipe))? {
        let entry = entry.map_err(failed("list", &pipe))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(failed("look at", &path))?;
        if is_stale(&path, kind) {
            fs::remove_file(&path).map_err(failed("remove", &path))?;
        }
    }
    Ok(())
}

fn is_stale(path: &Path, kind: FileType) -> bool {
    kind.is_socket() || kind.is_fifo() || path.extension() == Some(OsStr::new("pid"))
}

/// Unmounts and removes all of a GPU's.
pub(crate) fn remove(paths: &MpsPaths, gpu: &GpuUuid) -> Result<(), DirectoryError> {
    let (directory, shm) = (paths.daemon(gpu), paths.shm(gpu));
    // First, and with certainty: what is in it is the tenants'.
    shm::unmount(&shm).map_err(failed("unmount", &shm))?;
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
    let names: Result<Vec<_>, _> = entries.map(|entry| entry.map(|entry| entry.file_name())).collect();
    Ok(names.map_err(failed("list", &daemons))?.iter().filter_map(|name| gpu_named(name)).collect())
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DirectoryError + use<> {
    let path = path.to_owned();
    move |source| DirectoryError::Io { operation, path, source }
}
