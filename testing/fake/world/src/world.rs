//! `world.yaml`: the hardware of the machine.

mod decode;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use serde::Deserialize;

use crate::model::Model;
use crate::pci::{PciAddress, PcieLevel};

/// Maximum number of GPUs; the usage file has as many columns.
pub const MAX_GPUS: usize = 32;

/// NVIDIA driver of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Driver {
    /// Version of the kernel driver, such as `580.95.05`.
    pub version: String,
    /// Highest supported CUDA version, such as `13.0`.
    pub cuda: String,
}

impl Driver {
    /// Returns the CUDA version in the notation of NVML and `cuDriverGetVersion`: 1000 x major + 10
    /// x minor.
    pub fn cuda_number(&self) -> i32 {
        cuda_number(&self.cuda).expect("invariant: checked when the world was read")
    }

    /// Returns true if NVML has the field for the recovery action (since 565).
    pub fn knows_recovery_action(&self) -> bool {
        let major = self.version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        major.is_some_and(|major| major >= 565)
    }

    /// Returns the version of the NVML library: the CUDA major version before the driver's version.
    pub fn nvml_version(&self) -> String {
        format!("{}.{}", self.cuda_number() / 1000, self.version)
    }
}

fn cuda_number(text: &str) -> Option<i32> {
    let (major, minor) = text.split_once('.')?;
    let (major, minor): (u8, u8) = (major.parse().ok()?, minor.parse().ok()?);
    Some(i32::from(major) * 1000 + i32::from(minor) * 10)
}

/// Time model of GPU work.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct TimeModel {
    /// Real seconds per modelled second of GPU work; 0: GPU work takes no time.
    pub scale: f64,
    /// Host nanoseconds of one kernel launch.
    pub launch_nanos: u64,
    /// GPU nanoseconds of one wave of blocks, for kernels without modelled length.
    pub wave_nanos: u64,
    /// Resident blocks of such a kernel on one multiprocessor.
    pub blocks_per_multiprocessor: u32,
}

impl Default for TimeModel {
    /// Returns real time, 4 us per launch, and 10 us per wave of 16 blocks per SM. A real driver's
    /// launch takes 4 us within a factor of two.
    fn default() -> Self {
        Self { scale: 1.0, launch_nanos: 4_000, wave_nanos: 10_000, blocks_per_multiprocessor: 16 }
    }
}

impl TimeModel {
    /// Returns the modelled GPU nanoseconds of a kernel with this number of blocks, in whole waves.
    pub fn kernel_nanos(&self, model: &Model, blocks: u64) -> u64 {
        let per_wave = u64::from(model.multiprocessors) * u64::from(self.blocks_per_multiprocessor);
        blocks.div_ceil(per_wave.max(1)).max(1).saturating_mul(self.wave_nanos)
    }

    /// Returns the real time of modelled GPU time.
    pub fn real(&self, modelled_nanos: u64) -> Duration {
        Duration::from_nanos((modelled_nanos as f64 * self.scale) as u64)
    }
}

/// Remote end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NvLinkEnd {
    /// Another GPU, by its index.
    Gpu(usize),
    /// An NVSwitch.
    Switch(PciAddress),
}

/// An active NVLink of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvLink {
    /// Number of the link on its GPU.
    pub index: u32,
    /// Remote end.
    pub remote: NvLinkEnd,
}

/// A GPU of the world.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpu {
    /// NVML index.
    pub index: usize,
    /// UUID with the prefix `GPU-`.
    pub uuid: String,
    /// Board serial number.
    pub serial: String,
    /// Number N of `/dev/nvidiaN`.
    pub minor: u32,
    /// PCI address.
    pub pci: PciAddress,
    /// Host bridge, such as `pci0000:16`.
    pub pcie_root: String,
    /// Bridges between host bridge and GPU, starting at the root port.
    pub bridges: Vec<PciAddress>,
    /// NUMA node; `None` if the machine has no NUMA (the kernel writes -1).
    pub numa_node: Option<u32>,
    /// True if MIG mode is enabled.
    pub mig: bool,
    /// Product.
    pub model: Arc<Model>,
    /// Active NVLinks, by index.
    pub links: Vec<NvLink>,
}

/// A machine with GPUs. Immutable; variable state is in [`crate::Control`] and [`crate::Usage`].
#[derive(Debug, Clone, PartialEq)]
pub struct World {
    /// NVIDIA driver.
    pub driver: Driver,
    /// Time model.
    pub time: TimeModel,
    /// GPUs, by index.
    pub gpus: Vec<Gpu>,
    /// CPUs of each NUMA node, as `cpulist` (`0-55`).
    pub cpus: Vec<String>,
    /// NVSwitches.
    pub switches: Vec<PciAddress>,
}

impl World {
    /// Reads and validates a world file.
    ///
    /// # Errors
    /// Every error names the file and the field.
    pub fn load(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read world `{}`", path.display()))?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Decodes and validates a world; errors name `origin`.
    ///
    /// # Errors
    /// Every error names the field.
    pub fn parse(text: &str, origin: &str) -> anyhow::Result<Self> {
        let file: decode::WorldFile = serde_saphyr::from_str(text)
            .map_err(|error| anyhow!("malformed world `{origin}`: {error}"))?;
        file.resolve()
            .map_err(|(field, reason)| anyhow!("invalid world `{origin}`: {field}: {reason}"))
    }

    /// Returns the GPU with a UUID.
    pub fn gpu_by_uuid(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }

    /// Returns the PCIe distance of two GPUs.
    pub fn pcie_level(&self, a: usize, b: usize) -> PcieLevel {
        let (a, b) = (&self.gpus[a], &self.gpus[b]);
        if a.index == b.index {
            return PcieLevel::Internal;
        }
        if a.pcie_root != b.pcie_root {
            return if a.numa_node == b.numa_node { PcieLevel::Node } else { PcieLevel::System };
        }
        let shared = a.bridges.iter().zip(&b.bridges).take_while(|(x, y)| x == y).count();
        // Each GPU has one downstream port below the shared port of a switch; more ports mean more
        // switches.
        let deepest = a.bridges.len().max(b.bridges.len()) - shared;
        match (shared, deepest) {
            (0, _) => PcieLevel::HostBridge,
            (_, 0 | 1) => PcieLevel::Single,
            _ => PcieLevel::Multiple,
        }
    }

    /// Returns the number of direct NVLinks between two GPUs, without those through switches.
    pub fn direct_links(&self, a: usize, b: usize) -> usize {
        self.gpus[a].links.iter().filter(|link| link.remote == NvLinkEnd::Gpu(b)).count()
    }
}

#[cfg(test)]
mod tests;
