//! A GPU product: the properties that all boards of one model share.

use serde::{Deserialize, Serialize};

use crate::pci::PciDeviceId;

/// NVIDIA's architectures, as in `nvmlDeviceGetArchitecture`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are NVIDIA's")]
pub enum Architecture {
    Kepler,
    Maxwell,
    Pascal,
    Volta,
    Turing,
    Ampere,
    Ada,
    Hopper,
    Blackwell,
}

impl Architecture {
    /// Returns the value of `nvmlDeviceArchitecture_t`.
    pub fn nvml_value(self) -> u32 {
        match self {
            Self::Kepler => 2,
            Self::Maxwell => 3,
            Self::Pascal => 4,
            Self::Volta => 5,
            Self::Turing => 6,
            Self::Ampere => 7,
            Self::Ada => 8,
            Self::Hopper => 9,
            Self::Blackwell => 10,
        }
    }
}

/// Brands, as in `nvmlDeviceGetBrand` (those of data centres).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names are NVIDIA's")]
pub enum Brand {
    Quadro,
    Tesla,
    GeForce,
    NvidiaRtx,
    #[default]
    Nvidia,
}

impl Brand {
    /// Returns the value of `nvmlBrandType_t`.
    pub fn nvml_value(self) -> u32 {
        match self {
            Self::Quadro => 1,
            Self::Tesla => 2,
            Self::GeForce => 5,
            Self::NvidiaRtx => 12,
            Self::Nvidia => 14,
        }
    }
}

/// A CUDA compute capability, written `major.minor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ComputeCapability {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
}

impl TryFrom<String> for ComputeCapability {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let error = || {
            format!("invalid compute capability `{text}`: expected `major.minor` such as \"9.0\"")
        };
        let (major, minor) = text.split_once('.').ok_or_else(error)?;
        Ok(Self {
            major: major.parse().map_err(|_| error())?,
            minor: minor.parse().map_err(|_| error())?,
        })
    }
}

impl From<ComputeCapability> for String {
    fn from(value: ComputeCapability) -> Self {
        format!("{}.{}", value.major, value.minor)
    }
}

/// A GPU product.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Model {
    /// Product name as NVML and CUDA report it, for example `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Chip generation.
    pub architecture: Architecture,
    /// Brand.
    #[serde(default)]
    pub brand: Brand,
    /// CUDA compute capability.
    pub compute_capability: ComputeCapability,
    /// PCI vendor and device ids of the chip, such as `10de:2330`.
    pub pci_id: PciDeviceId,
    /// Total memory in MiB, as `nvidia-smi` shows it.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: u64,
    /// MiB that driver and firmware reserve, which cannot be allocated.
    #[serde(default, rename = "reservedMiB")]
    pub reserved_mib: u64,
    /// MiB that one CUDA context uses on the GPU.
    #[serde(rename = "contextMiB")]
    pub context_mib: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Maximum resident threads of one multiprocessor.
    pub threads_per_multiprocessor: u32,
    /// Highest SM clock in MHz.
    #[serde(rename = "smClockMHz")]
    pub sm_clock_mhz: u32,
    /// Memory clock in MHz.
    #[serde(rename = "memoryClockMHz")]
    pub memory_clock_mhz: u32,
    /// Width of the memory bus in bits.
    pub memory_bus_bits: u32,
    /// Board power limit in watts.
    pub power_watts: u32,
    /// True if the GPU has ECC memory, which is then enabled.
    #[serde(default)]
    pub ecc: bool,
    /// Maximum number of MIG devices; 0: no MIG.
    #[serde(default)]
    pub max_mig_devices: u32,
    /// Table of its MIG profiles, such as `h100-80gb`; absent: no profiles.
    #[serde(default)]
    pub mig_table: Option<String>,
    /// NVLink generation (1 to 5); absent: no NVLink.
    #[serde(default)]
    pub nvlink_version: Option<u32>,
    /// Number of NVLinks.
    #[serde(default)]
    pub nvlinks: u32,
}

const MIB: u64 = 1024 * 1024;

impl Model {
    /// Returns the total memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib * MIB
    }

    /// Returns the bytes that driver and firmware reserve.
    pub fn reserved_bytes(&self) -> u64 {
        self.reserved_mib * MIB
    }

    /// Returns the bytes that processes can allocate.
    pub fn usable_bytes(&self) -> u64 {
        self.memory_bytes() - self.reserved_bytes()
    }

    /// Returns the bytes of one CUDA context.
    pub fn context_bytes(&self) -> u64 {
        self.context_mib * MIB
    }
}
