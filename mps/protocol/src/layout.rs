//! Paths of the protocol's files.

use std::path::{Path, PathBuf};

use tessera_api::names::GpuUuid;

/// Paths below `<state-dir>/mps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsPaths {
    root: PathBuf,
}

impl MpsPaths {
    /// Returns the paths for tessera-driver's state directory.
    #[must_use]
    pub fn new(state_dir: impl AsRef<Path>) -> Self {
        Self { root: state_dir.as_ref().join("mps") }
    }

    /// Returns the directory that contains all files of the protocol.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the directory with an empty file for each GPU that needs a daemon. Only
    /// tessera-driver writes here.
    #[must_use]
    pub fn wanted(&self) -> PathBuf {
        self.root.join("wanted")
    }

    /// Returns the file that exists while the GPU needs a daemon.
    #[must_use]
    pub fn wanted_file(&self, gpu: &GpuUuid) -> PathBuf {
        self.wanted().join(gpu.as_str())
    }

    /// Returns the file that the supervisor locks while it runs, and that contains its PID.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.root.join("supervisor.lock")
    }

    /// Returns the parent of the daemons' directories. The supervisor writes here, and daemons
    /// write to their own.
    #[must_use]
    pub fn daemons(&self) -> PathBuf {
        self.root.join("daemons")
    }

    /// Returns the directory of a GPU's daemon.
    #[must_use]
    pub fn daemon(&self, gpu: &GpuUuid) -> PathBuf {
        self.daemons().join(gpu.as_str())
    }

    /// Returns the path of the daemon's [`MpsDaemonStatus`](crate::MpsDaemonStatus).
    #[must_use]
    pub fn status(&self, gpu: &GpuUuid) -> PathBuf {
        self.daemon(gpu).join("status.json")
    }

    /// Returns the `CUDA_MPS_PIPE_DIRECTORY` of a GPU, through which daemon and clients
    /// communicate. Its inode does not change while the daemon is wanted.
    #[must_use]
    pub fn pipe(&self, gpu: &GpuUuid) -> PathBuf {
        self.daemon(gpu).join("pipe")
    }

    /// Returns the `CUDA_MPS_LOG_DIRECTORY` of a GPU.
    #[must_use]
    pub fn log(&self, gpu: &GpuUuid) -> PathBuf {
        self.daemon(gpu).join("log")
    }

    /// Returns the tmpfs that the daemon and its clients have at `/dev/shm`. It is not remounted
    /// while the daemon is wanted.
    #[must_use]
    pub fn shm(&self, gpu: &GpuUuid) -> PathBuf {
        self.daemon(gpu).join("shm")
    }
}

/// Returns the GPU that a directory entry is named after, or `None` if the name is not a UUID in
/// NVML's notation.
pub fn gpu_named(name: &std::ffi::OsStr) -> Option<GpuUuid> {
    let name = name.to_str()?;
    GpuUuid::new(name).ok().filter(|gpu| gpu == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77";

    #[test]
    fn files_are_below_mps_in_state_directory() {
        let (paths, gpu) = (MpsPaths::new("/run/tessera"), GpuUuid::new(GPU).expect("a UUID"));
        assert_eq!(paths.lock(), Path::new("/run/tessera/mps/supervisor.lock"));
        assert_eq!(paths.wanted_file(&gpu), Path::new("/run/tessera/mps/wanted").join(GPU));
        let daemon = Path::new("/run/tessera/mps/daemons").join(GPU);
        assert_eq!(paths.status(&gpu), daemon.join("status.json"));
        assert_eq!(
            [paths.pipe(&gpu), paths.log(&gpu), paths.shm(&gpu)],
            ["pipe", "log", "shm"].map(|name| daemon.join(name))
        );
    }

    #[test]
    fn gpu_name_must_be_in_nvml_notation() {
        assert!(gpu_named(GPU.as_ref()).is_some());
        for other in [".wanted.new", "GPU-1F0C2D3E-9a41-7c3b-8e55-0d6f2b1a4c77", "MIG-1f0c2d3e"] {
            assert_eq!(gpu_named(other.as_ref()), None, "{other}");
        }
    }
}
