//! Paths of the built programs and libraries.

use std::path::{Path, PathBuf};

/// Built files of this workspace.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    pub(crate) simcluster: PathBuf,
    pub(crate) driver: PathBuf,
    pub(crate) controller: PathBuf,
    pub(crate) probe: PathBuf,
    pub(crate) fake_world: PathBuf,
    pub(crate) fake_nvml: PathBuf,
    pub(crate) fake_cuda: PathBuf,
    pub(crate) intercept: PathBuf,
    pub(crate) fake_clock: PathBuf,
}

impl Programs {
    /// Returns the files beside this program, where cargo puts all of them. The interceptor is
    /// taken from the directory of its own profile.
    pub(crate) fn beside_this() -> anyhow::Result<Self> {
        let simcluster = std::env::current_exe()?;
        let directory = simcluster.parent().unwrap_or(Path::new("/")).to_owned();
        let mut missing = Vec::new();
        let mut find = |file: &str, package: &'static str| {
            let path = directory.join(file);
            if !path.is_file() {
                missing.push(package);
            }
            path
        };
        let programs = Self {
            driver: find("tessera-driver", "tessera-driver"),
            controller: find("tessera-controller", "tessera-controller"),
            probe: find("tessera-probe", "tessera-probe"),
            fake_world: find("tessera-fake-world", "tessera-fake-world"),
            fake_nvml: find("libnvidia_ml.so", "tessera-fake-nvml"),
            fake_cuda: find("libcuda.so", "tessera-fake-cuda"),
            intercept: find(
                "../intercept/libtessera_intercept.so",
                "tessera-intercept --profile intercept",
            ),
            fake_clock: find("libtessera_fake_clock.so", "tessera-fake-clock"),
            simcluster,
        };
        anyhow::ensure!(
            missing.is_empty(),
            "missing in {}: {}; run `make build`",
            directory.display(),
            missing.join(", ")
        );
        Ok(programs)
    }
}
