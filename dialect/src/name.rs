//! Names of the dialects.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Label of a namespace or pod that selects the dialect of its pods, or [`NO_DIALECT`].
pub const DIALECT_LABEL: &str = "gpu.tessera.dev/dialect";
/// Value of [`DIALECT_LABEL`] for pods that are never converted.
pub const NO_DIALECT: &str = "none";

/// A GPU-sharing system whose pods can be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// HAMi.
    Hami,
    /// 4paradigm's k8s-vgpu-scheduler.
    #[serde(rename = "4paradigm")]
    FourParadigm,
    /// vgpu-manager.
    VgpuManager,
    /// Volcano's vGPU and GPU sharing.
    Volcano,
    /// KAI scheduler and Run:ai.
    Kai,
    /// NVIDIA's device plugin and GKE's.
    Nvidia,
    /// AWS virtual GPU device plugin.
    Aws,
    /// elastic-gpu-scheduler.
    Elastic,
    /// KubeGPU and KubeDevice.
    Kubegpu,
    /// Aliyun's gpushare scheduler extender.
    Gpushare,
    /// tkestack's gpu-manager.
    GpuManager,
}

impl Dialect {
    /// All dialects.
    pub const ALL: [Self; 11] = [
        Self::Hami,
        Self::FourParadigm,
        Self::VgpuManager,
        Self::Volcano,
        Self::Kai,
        Self::Nvidia,
        Self::Aws,
        Self::Elastic,
        Self::Kubegpu,
        Self::Gpushare,
        Self::GpuManager,
    ];

    /// Returns the name in settings, labels and template names.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hami => "hami",
            Self::FourParadigm => "4paradigm",
            Self::VgpuManager => "vgpu-manager",
            Self::Volcano => "volcano",
            Self::Kai => "kai",
            Self::Nvidia => "nvidia",
            Self::Aws => "aws",
            Self::Elastic => "elastic",
            Self::Kubegpu => "kubegpu",
            Self::Gpushare => "gpushare",
            Self::GpuManager => "gpu-manager",
        }
    }

    /// Returns the dialect of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dialect| dialect.name() == name)
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
