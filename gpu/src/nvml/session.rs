//! Loaded and initialised NVML library.

use std::path::PathBuf;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use tessera_api::gpu::CudaVersion;

use super::NvmlOptions;
use crate::library::LibraryError;
use crate::search::{LibraryCandidate, candidates};

/// NVML between initialisation and shutdown. It is shut down when the last reference is dropped.
#[derive(Debug)]
pub(super) struct Session {
    nvml: Nvml,
    library: LibraryCandidate,
}

/// Driver versions of the node.
pub(super) struct Versions {
    /// Version of the kernel driver, as NVML prints it.
    pub(super) driver: String,
    /// Highest supported CUDA version.
    pub(super) cuda: CudaVersion,
}

impl Session {
    /// Loads the first library that exists. The search ends at a library that loads and cannot be
    /// initialised: another one would use the same kernel driver.
    pub(super) fn open(options: &NvmlOptions) -> Result<Self, LibraryError> {
        let mut searched = Vec::new();
        let mut last = NvmlError::LibraryNotFound;
        for library in candidates(options.library.as_deref(), &options.driver_root) {
            match Nvml::builder().lib_path(&library.to_os_string()).init() {
                Ok(nvml) => return Ok(Self { nvml, library }),
                // The file is missing, is not a library, or is not NVML.
                Err(error @ (NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_))) => {
                    searched.push(library.to_string());
                    last = error;
                }
                Err(source) => {
                    return Err(LibraryError::Initialise { library: library.to_string(), source });
                }
            }
        }
        Err(LibraryError::NotFound { searched: searched.join(", "), source: last })
    }

    pub(super) fn nvml(&self) -> &Nvml {
        &self.nvml
    }

    pub(super) fn library_path(&self) -> Option<PathBuf> {
        match &self.library {
            LibraryCandidate::File(path) => Some(path.clone()),
            LibraryCandidate::Loader => None,
        }
    }

    pub(super) fn versions(&self) -> Result<Versions, LibraryError> {
        let failed = |call| move |source| LibraryError::Call { call, source };
        let driver =
            self.nvml.sys_driver_version().map_err(failed("nvmlSystemGetDriverVersion"))?;
        let cuda = self
            .nvml
            .sys_cuda_driver_version()
            .map_err(failed("nvmlSystemGetCudaDriverVersion_v2"))?;
        let cuda = CudaVersion::from_number(u32::try_from(cuda).unwrap_or(0));
        Ok(Versions { driver, cuda })
    }
}
