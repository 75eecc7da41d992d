//! Where the files are.

use std::path::{Path, PathBuf};

use tessera_api::names::GpuUuid;

/// The files below `<state-dir>/mps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsPaths {
    root: PathBuf,
}

impl MpsPaths {
    /// Those of a state directory, which is tessera-driver's.
    #[must_use]
    pub fn new(state_dir: impl AsRef<Path>) -> Self {
        Self { root: state_dir.as_ref().join("mps") }
    }

    /// All of them are below this.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// An empty file for each GPU that a daemon is wanted for. Only tessera-driver writes here.
    #[must_use]
    pub fn wanted(&self) -> PathBuf {
        self.root.join("wanted")
    }

    /// There while a daemon is wanted for the GPU.
    #[must_use]
    pub fn wanted_of(&self, gpu: &GpuUuid) -> PathBuf {
        self.wanted().join(gpu.as_str())
    }

    /// Locked by the keeper while it runs; its PID is in it.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.root.join("keeper.lock")
    }

    /// A directory for each daemon. Only the keeper writes here, and daemons in theirs.
    #[must_use]
    pub fn daemons(&self) -> PathBuf {
        self.root.join("daemons")
    }

    /// All that belongs to the daemon of a GPU.
    #[must_use]
    pub fn daemon(&self, gpu: &GpuUuid) -> PathBuf {
        self.daemons().join(gpu.as_str())
    }

    /// How the daemon is: [`Status`](crate::Status).
    #[must_use]
    pub fn status(&self, gpu: &GpuUuid) -> PathBuf {
        self.daemon(gpu).join("status.json")
    }

    /// `CUDA_MPS_PIPE_DIRECTORY`, where daemon and clients meet. The same inode as long as the
    /// daemon is wanted.
    #[must_use]
    pub fn pipe(&self, gpu: &GpuUuid) -> PathBuf {
        self.daemon(gpu).join("pipe")
    }

    /// `CUDA_MPS_LOG_DIRECTORY`.
    #[must_use]
    pub fn log(&self, gpu: &GpuUuid) -> PathBuf {
        self.daemon(gpu).join("log")
    }

    /// What the daemon and its clients see at `/dev/shm`: a tmpfs, the same as long as the daemon
    /// is wanted.
    #[must_use]
    pub fn shm(&self, gpu: &GpuUuid) -> PathBuf {
        self.daemon(gpu).join("shm")
    }
}

/// The GPU that a directory entry is named after; `None` also where a UUID is not written as NVML
/// prints it.
pub fn gpu_named(name: &std::ffi::OsStr) -> Option<GpuUuid> {
    let name = name.to_str()?;
    GpuUuid::new(name).ok().filter(|gpu| gpu == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77";

    #[test]
    fn everything_is_below_mps_of_the_state_directory() {
        let (paths, gpu) = (MpsPaths::new("/run/tessera"), GpuUuid::new(GPU).expect("a UUID"));
        assert_eq!(paths.lock(), Path::new("/run/tessera/mps/keeper.lock"));
        assert_eq!(paths.wanted_of(&gpu), Path::new("/run/tessera/mps/wanted").join(GPU));
        let daemon = Path::new("/run/tessera/mps/daemons").join(GPU);
        assert_eq!(paths.status(&gpu), daemon.join("status.json"));
        assert_eq!(
            [paths.pipe(&gpu), paths.log(&gpu), paths.shm(&gpu)],
            ["pipe", "log", "shm"].map(|name| daemon.join(name))
        );
    }

    #[test]
    fn a_name_is_a_gpus_as_nvml_prints_it() {
        assert!(gpu_named(GPU.as_ref()).is_some());
        for other in [".wanted.new", "GPU-1F0C2D3E-9a41-7c3b-8e55-0d6f2b1a4c77", "MIG-1f0c2d3e"] {
            assert_eq!(gpu_named(other.as_ref()), None, "{other}");
        }
    }
}
