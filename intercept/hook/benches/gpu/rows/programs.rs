//! Programs of the machine that some rows need.

use std::env;
use std::path::PathBuf;

/// Paths of the programs that exist.
#[derive(Default)]
pub(crate) struct Programs {
    pub(crate) python: Option<PathBuf>,
    pub(crate) smi: Option<PathBuf>,
    pub(crate) ncu: Option<PathBuf>,
    pub(crate) mps_control: Option<PathBuf>,
}

pub(super) const PYTHON: &str = "python3";
pub(super) const SMI: &str = "nvidia-smi";
pub(super) const NCU: &str = "ncu";
pub(super) const MPS_CONTROL: &str = "nvidia-cuda-mps-control";

impl Programs {
    /// Searches PATH.
    pub(crate) fn of_this_machine() -> Self {
        let find = |name| {
            let directories = env::var_os("PATH").unwrap_or_default();
            env::split_paths(&directories)
                .map(|directory| directory.join(name))
                .find(|path| path.is_file())
        };
        Self {
            python: find(PYTHON),
            smi: find(SMI),
            ncu: find(NCU),
            mps_control: find(MPS_CONTROL),
        }
    }
}

/// Returns the text of a row whose program does not exist.
pub(crate) fn absent(program: &str) -> String {
    format!("no `{program}` in PATH")
}
