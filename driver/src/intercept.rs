//! Injection of the interceptor into containers: LD_PRELOAD, library replacement, or both.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Injection mode of the interceptor for claims that are prepared from now on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum InterceptMode {
    /// Preloaded into every program.
    #[default]
    Preload,
    /// Mounted over libcuda and NVML.
    Proxy,
    /// Preloaded and mounted over libraries.
    Both,
}

impl InterceptMode {
    /// Returns true if the interceptor is preloaded.
    #[must_use]
    pub const fn preloads(self) -> bool {
        !matches!(self, Self::Proxy)
    }

    /// Returns true if proxies replace the driver's libraries.
    #[must_use]
    pub const fn replaces(self) -> bool {
        !matches!(self, Self::Preload)
    }

    /// Returns the injection into containers that get these libraries of the driver, or `None` if a
    /// proxy would replace a missing libcuda: no limit would be enforced.
    #[must_use]
    pub fn injection(self, driver_libraries: Vec<PathBuf>) -> Option<Injection> {
        let has_cuda =
            driver_libraries.iter().any(|path| path.ends_with(ProxiedLibrary::Cuda.soname()));
        let replaced_libraries = if self.replaces() { driver_libraries } else { Vec::new() };
        (has_cuda || !self.replaces())
            .then_some(Injection { preloaded: self.preloads(), replaced_libraries })
    }
}

/// Injection of the interceptor into the containers of a claim. It does not change while the claim
/// is prepared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Injection {
    /// True if the interceptor is preloaded into every program.
    pub preloaded: bool,
    /// Container paths of the libraries over which a proxy is mounted.
    #[serde(rename = "inPlaceOf")]
    pub replaced_libraries: Vec<PathBuf>,
}

impl Default for Injection {
    fn default() -> Self {
        Self { preloaded: true, replaced_libraries: Vec::new() }
    }
}

impl Injection {
    /// Returns true for the injection of journals without this field.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// A library of the NVIDIA driver that a proxy can replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxiedLibrary {
    /// libcuda.
    Cuda,
    /// libnvidia-ml.
    Nvml,
}

impl ProxiedLibrary {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Cuda, Self::Nvml];

    /// Returns the library at a path, by its file name: `libcuda.so` with or without a version.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        Self::ALL.into_iter().find(|library| {
            let rest = name.strip_prefix(library.soname().trim_end_matches(".1"));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    }

    /// Returns the name that programs link to.
    #[must_use]
    pub const fn soname(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda.so.1",
            Self::Nvml => "libnvidia-ml.so.1",
        }
    }

    /// Returns the file name of its proxy.
    #[must_use]
    pub const fn proxy(self) -> &'static str {
        match self {
            Self::Cuda => "libtessera_intercept_cuda.so",
            Self::Nvml => "libtessera_intercept_nvml.so",
        }
    }

    /// Returns the container path from which the proxy loads the real library. The path is compiled
    /// into the proxy.
    #[must_use]
    pub fn real_path(self) -> PathBuf {
        Path::new("/usr/local/lib/tessera/driver").join(self.soname())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_libraries_by_name_and_version() {
        let of = |name: &str| ProxiedLibrary::of(&Path::new("/usr/lib64").join(name));
        for name in ["libcuda.so", "libcuda.so.1", "libcuda.so.580.95.05"] {
            assert_eq!(of(name), Some(ProxiedLibrary::Cuda), "{name}");
        }
        assert_eq!(of("libnvidia-ml.so.1"), Some(ProxiedLibrary::Nvml));
        for name in ["libcudadebugger.so.1", "libcuda.sock", "libnvidia-ptxjitcompiler.so.1"] {
            assert_eq!(of(name), None, "{name}");
        }
    }

    #[test]
    fn journal_format_of_injection_is_stable() {
        let json = r#"{"preloaded":false,"inPlaceOf":["/usr/lib64/libcuda.so.1"]}"#;
        let injection: Injection = serde_json::from_str(json).expect("an injection");
        assert_eq!(injection.replaced_libraries, [PathBuf::from("/usr/lib64/libcuda.so.1")]);
        assert_eq!(serde_json::to_string(&injection).expect("JSON"), json);
    }

    #[test]
    fn refuses_injection_without_libcuda() {
        let nvml = || vec![PathBuf::from("/usr/lib64/libnvidia-ml.so.1")];
        assert_eq!(InterceptMode::Proxy.injection(nvml()), None);
        assert_eq!(InterceptMode::Both.injection(Vec::new()), None);
        assert_eq!(InterceptMode::Preload.injection(nvml()), Some(Injection::default()));
    }
}
