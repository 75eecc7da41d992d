//! `world.yaml`: what the machine is.

mod decode;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use crate::model::Model;
use crate::pci::{PciAddress, PcieLevel};

/// The most GPUs a world may have; the usage file has that many columns.
pub const MAX_GPUS: usize = 32;

/// Why a world could not be read.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// The file cannot be read.
    #[error("cannot read the world `{path}`")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not YAML, or a field is unknown, missing or of the wrong kind.
    #[error("the world `{origin}` is malformed: {message}")]
    Malformed {
        /// The file, or what else the text came from.
        origin: String,
        /// What the decoder says: it names line and field.
        message: String,
    },
    /// The fields do not fit together.
    #[error("the world `{origin}` is not possible: {field}: {reason}")]
    Impossible {
        /// The file, or what else the text came from.
        origin: String,
        /// Path of the field.
        field: String,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
}

/// The NVIDIA driver that the machine seems to have.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Driver {
    /// Version of the kernel driver, `580.95.05`.
    pub version: String,
    /// Highest CUDA version it serves, `13.0`.
    pub cuda: String,
}

impl Driver {
    /// The CUDA version as NVML and `cuDriverGetVersion` count it: 1000 x major + 10 x minor.
    pub fn cuda_number(&self) -> i32 {
        cuda_number(&self.cuda).expect("invariant: checked when the world was read")
    }

    /// Whether NVML knows the field for the recovery action: since 565.
    pub fn knows_recovery_action(&self) -> bool {
        let major = self.version.split('.').next().and_then(|major| major.parse::<u32>().ok());
        major.is_some_and(|major| major >= 565)
    }

    /// Version of the NVML library: the CUDA major version in front of the driver's.
    pub fn nvml_version(&self) -> String {
        format!("{}.{}", self.cuda_number() / 1000, self.version)
    }
}

fn cuda_number(text: &str) -> Option<i32> {
    let (major, minor) = text.split_once('.')?;
    let (major, minor): (u8, u8) = (major.parse().ok()?, minor.parse().ok()?);
    Some(i32::from(major) * 1000 + i32::from(minor) * 10)
}

/// How long things take.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct TimeModel {
    /// Real seconds per modelled second of GPU work; 0 = GPU work takes no time at all.
    pub scale: f64,
    /// Host nanoseconds that one kernel launch costs its caller.
    pub launch_nanos: u64,
    /// GPU nanoseconds of one wave of blocks, where the kernel does not say how long it takes.
    pub wave_nanos: u64,
    /// Blocks of such a kernel that one multiprocessor holds at a time.
    pub blocks_per_multiprocessor: u32,
}

impl Default for TimeModel {
    /// Real time; 4 us a launch (what a real driver takes, within a factor of two); 10 us a wave of
    /// 16 blocks per SM.
    fn default() -> Self {
        Self { scale: 1.0, launch_nanos: 4_000, wave_nanos: 10_000, blocks_per_multiprocessor: 16 }
    }
}

impl TimeModel {
    /// Modelled GPU nanoseconds of a kernel of so many blocks on that GPU: whole waves.
    pub fn kernel_nanos(&self, model: &Model, blocks: u64) -> u64 {
        let per_wave = u64::from(model.multiprocessors) * u64::from(self.blocks_per_multiprocessor);
        blocks.div_ceil(per_wave.max(1)).max(1).saturating_mul(self.wave_nanos)
    }

    /// Real time that so much modelled GPU time takes.
    pub fn real(&self, modelled_nanos: u64) -> Duration {
        Duration::from_nanos((modelled_nanos as f64 * self.scale) as u64)
    }
}

/// What is at the other end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NvLinkEnd {
    /// Another GPU, by its index.
    Gpu(usize),
    /// An NVSwitch.
    Switch(PciAddress),
}

/// One active NVLink of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvLink {
    /// Number of the link on its GPU.
    pub index: u32,
    /// Where it leads.
    pub remote: NvLinkEnd,
}

/// One GPU of the world.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpu {
    /// Position among the GPUs: NVML's index.
    pub index: usize,
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// Board serial number.
    pub serial: String,
    /// N of `/dev/nvidiaN`.
    pub minor: u32,
    /// Address.
    pub pci: PciAddress,
    /// Host bridge, `pci0000:16`.
    pub pcie_root: String,
    /// Bridges between host bridge and GPU: root port first.
    pub bridges: Vec<PciAddress>,
    /// NUMA node; `None` where the machine has no NUMA (the kernel writes -1).
    pub numa_node: Option<u32>,
    /// MIG mode is on.
    pub mig: bool,
    /// The product.
    pub model: Arc<Model>,
    /// Active NVLinks, by index.
    pub links: Vec<NvLink>,
}

/// A machine with GPUs. Immutable; what changes is in [`crate::Control`] and [`crate::Usage`].
#[derive(Debug, Clone, PartialEq)]
pub struct World {
    /// The NVIDIA driver.
    pub driver: Driver,
    /// How long things take.
    pub time: TimeModel,
    /// The GPUs, by index.
    pub gpus: Vec<Gpu>,
    /// CPUs of each NUMA node, as `cpulist` (`0-55`).
    pub cpus: Vec<String>,
    /// NVSwitches.
    pub switches: Vec<PciAddress>,
}

impl World {
    /// Reads and checks a world file.
    ///
    /// # Errors
    /// Every error names the file and the field.
    pub fn load(path: &Path) -> Result<Self, WorldError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| WorldError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Decodes and checks a world; `origin` is named in errors.
    ///
    /// # Errors
    /// Every error names the field.
    pub fn parse(text: &str, origin: &str) -> Result<Self, WorldError> {
        let file: decode::WorldFile = serde_saphyr::from_str(text).map_err(|error| {
            WorldError::Malformed { origin: origin.to_owned(), message: error.to_string() }
        })?;
        file.resolve().map_err(|(field, reason)| WorldError::Impossible {
            origin: origin.to_owned(),
            field,
            reason,
        })
    }

    /// The GPU with that UUID.
    pub fn gpu_by_uuid(&self, uuid: &str) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == uuid)
    }

    /// How far apart two GPUs are on PCIe.
    pub fn pcie_level(&self, a: usize, b: usize) -> PcieLevel {
        let (a, b) = (&self.gpus[a], &self.gpus[b]);
        if a.index == b.index {
            return PcieLevel::Internal;
        }
        if a.pcie_root != b.pcie_root {
            return if a.numa_node == b.numa_node { PcieLevel::Node } else { PcieLevel::System };
        }
        let shared = a.bridges.iter().zip(&b.bridges).take_while(|(x, y)| x == y).count();
        // Below the shared port of a switch each side has one downstream port; more of them = more
        // switches.
        let deepest = a.bridges.len().max(b.bridges.len()) - shared;
        match (shared, deepest) {
            (0, _) => PcieLevel::HostBridge,
            (_, 0 | 1) => PcieLevel::Single,
            _ => PcieLevel::Multiple,
        }
    }

    /// Number of direct NVLinks between two GPUs, not counting those through switches.
    pub fn direct_links(&self, a: usize, b: usize) -> usize {
        self.gpus[a].links.iter().filter(|link| link.remote == NvLinkEnd::Gpu(b)).count()
    }
}

#[cfg(test)]
mod tests;
