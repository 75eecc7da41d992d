//! Where the interceptor stands in containers.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Where the interceptor is to stand in containers of claims that are prepared from now on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Intercept {
    /// In every program.
    #[default]
    Preload,
    /// In the place of libcuda and NVML.
    Proxy,
    /// Both.
    Both,
}

impl Intercept {
    /// Whether it is in every program.
    #[must_use]
    pub const fn preloads(self) -> bool {
        !matches!(self, Self::Proxy)
    }

    /// Whether it is in the driver's place.
    #[must_use]
    pub const fn replaces(self) -> bool {
        !matches!(self, Self::Preload)
    }

    /// Where it stands in a container that has these libraries of the driver. `None` where it would
    /// stand in the place of a libcuda that is not there: nothing would hold the container.
    #[must_use]
    pub fn stand(self, driver_libraries: Vec<PathBuf>) -> Option<Stand> {
        let has_cuda = driver_libraries.iter().any(|path| path.ends_with(Library::Cuda.soname()));
        let in_place_of = if self.replaces() { driver_libraries } else { Vec::new() };
        (has_cuda || !self.replaces()).then_some(Stand { preloaded: self.preloads(), in_place_of })
    }
}

/// Where the interceptor stands in a claim's containers; it stays so for the claim's life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Stand {
    /// In every program.
    pub preloaded: bool,
    /// The containers' paths of the libraries that a proxy is mounted over.
    pub in_place_of: Vec<PathBuf>,
}

impl Default for Stand {
    fn default() -> Self {
        Self { preloaded: true, in_place_of: Vec::new() }
    }
}

impl Stand {
    /// As in all journals before there was another.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// A library of the driver that there is a proxy of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// CUDA.
    Cuda,
    /// NVML.
    Nvml,
}

impl Library {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Cuda, Self::Nvml];

    /// Which one the file at a path is, by its name: `libcuda.so`, with or without versions.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        Self::ALL.into_iter().find(|library| {
            let rest = name.strip_prefix(library.soname().trim_end_matches(".1"));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    }

    /// What programs ask the loader for.
    #[must_use]
    pub const fn soname(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda.so.1",
            Self::Nvml => "libnvidia-ml.so.1",
        }
    }

    /// The file name of its proxy.
    #[must_use]
    pub const fn proxy(self) -> &'static str {
        match self {
            Self::Cuda => "libtessera_intercept_cuda.so",
            Self::Nvml => "libtessera_intercept_nvml.so",
        }
    }

    /// Where the proxy expects the real one in the container; it is written into the proxy.
    #[must_use]
    pub fn real_path(self) -> PathBuf {
        Path::new("/usr/local/lib/tessera/driver").join(self.soname())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_known_by_their_names_in_every_version_and_nothing_else_is() {
        let of = |name: &str| Library::of(&Path::new("/usr/lib64").join(name));
        for name in ["libcuda.so", "libcuda.so.1", "libcuda.so.580.95.05"] {
            assert_eq!(of(name), Some(Library::Cuda), "{name}");
        }
        assert_eq!(of("libnvidia-ml.so.1"), Some(Library::Nvml));
        for name in ["libcudadebugger.so.1", "libcuda.sock", "libnvidia-ptxjitcompiler.so.1"] {
            assert_eq!(of(name), None, "{name}");
        }
    }

    #[test]
    fn what_would_hold_nothing_is_no_stand() {
        let nvml = || vec![PathBuf::from("/usr/lib64/libnvidia-ml.so.1")];
        assert_eq!(Intercept::Proxy.stand(nvml()), None);
        assert_eq!(Intercept::Both.stand(Vec::new()), None);
        assert_eq!(Intercept::Preload.stand(nvml()), Some(Stand::default()));
    }
}
