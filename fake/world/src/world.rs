//! `world.yaml`: what the machine is.

use std::collections::{BTreeMap, HashSet};
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
    /// Real time; 4 us a launch (what a real driver takes, within a factor of two); 10 us a wave of 16 blocks per SM.
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct WorldFile {
    driver: Driver,
    #[serde(default)]
    time: TimeModel,
    #[serde(default)]
    models: BTreeMap<String, Model>,
    /// CPUs per NUMA node.
    #[serde(default)]
    cpus: Vec<String>,
    gpus: Vec<GpuFile>,
    #[serde(default)]
    nvlink: NvLinkFile,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct GpuFile {
    uuid: String,
    model: String,
    #[serde(default)]
    serial: Option<String>,
    #[serde(default)]
    minor: Option<u32>,
    pci: PciAddress,
    pcie_root: String,
    #[serde(default)]
    bridges: Vec<PciAddress>,
    #[serde(default)]
    numa_node: Option<u32>,
    #[serde(default)]
    mig: bool,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct NvLinkFile {
    /// Links between each pair of GPUs, a row and a column per GPU.
    peers: Vec<Vec<u32>>,
    /// Groups of GPUs behind NVSwitches.
    fabrics: Vec<Fabric>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Fabric {
    gpus: Vec<usize>,
    switches: Vec<PciAddress>,
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
        let file: WorldFile = serde_saphyr::from_str(text).map_err(|error| WorldError::Malformed {
            origin: origin.to_owned(),
            message: error.to_string(),
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
        // Below the shared port of a switch each side has one downstream port; more of them = more switches.
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

/// Path of the field, and what is wrong with it.
type Refusal = (String, String);

fn refuse<T>(field: impl Into<String>, reason: impl Into<String>) -> Result<T, Refusal> {
    Err((field.into(), reason.into()))
}

impl WorldFile {
    fn resolve(self) -> Result<World, Refusal> {
        let Self { driver, time, models, cpus, gpus, nvlink } = self;
        if cuda_number(&driver.cuda).is_none() {
            return refuse("driver.cuda", format!("`{}` is not `major.minor`", driver.cuda));
        }
        if !(time.scale >= 0.0 && time.scale.is_finite()) {
            return refuse("time.scale", "must be 0 or more");
        }
        let models = check_models(models)?;
        if gpus.len() > MAX_GPUS {
            return refuse("gpus", format!("{} GPUs; at most {MAX_GPUS} are supported", gpus.len()));
        }
        let mut gpus = resolve_gpus(gpus, &models)?;
        nvlink.connect(&mut gpus)?;
        let switches = nvlink.fabrics.into_iter().flat_map(|fabric| fabric.switches).collect();
        Ok(World { driver, time, gpus, cpus, switches })
    }
}

fn check_models(models: BTreeMap<String, Model>) -> Result<BTreeMap<String, Arc<Model>>, Refusal> {
    for (key, model) in &models {
        if model.memory_mib < model.reserved_mib + model.context_mib {
            let reason = format!("{} MiB do not hold reservedMiB and contextMiB", model.memory_mib);
            return refuse(format!("models.{key}.memoryMiB"), reason);
        }
        if model.multiprocessors == 0 {
            return refuse(format!("models.{key}.multiprocessors"), "must be 1 or more");
        }
        // The length of NVML's name buffer, with its terminating zero.
        if model.name.is_empty() || model.name.len() >= 96 {
            return refuse(format!("models.{key}.name"), "must have 1 to 95 characters");
        }
    }
    Ok(models.into_iter().map(|(key, model)| (key, Arc::new(model))).collect())
}

fn resolve_gpus(gpus: Vec<GpuFile>, models: &BTreeMap<String, Arc<Model>>) -> Result<Vec<Gpu>, Refusal> {
    let (mut uuids, mut addresses, mut minors) = (HashSet::new(), HashSet::new(), HashSet::new());
    let mut resolved = Vec::with_capacity(gpus.len());
    for (index, gpu) in gpus.into_iter().enumerate() {
        let field = |name: &str| format!("gpus[{index}].{name}");
        let Some(model) = models.get(&gpu.model) else {
            return refuse(field("model"), format!("`{}` is not among `models`", gpu.model));
        };
        if !is_gpu_uuid(&gpu.uuid) {
            return refuse(field("uuid"), format!("`{}` is not `GPU-` and a lower-case UUID", gpu.uuid));
        }
        if !uuids.insert(gpu.uuid.clone()) {
            return refuse(field("uuid"), format!("`{}` is used twice", gpu.uuid));
        }
        if !addresses.insert(gpu.pci) {
            return refuse(field("pci"), format!("`{}` is used twice", gpu.pci));
        }
        let minor = gpu.minor.unwrap_or(index as u32);
        if !minors.insert(minor) {
            return refuse(field("minor"), format!("{minor} is used twice"));
        }
        if gpu.mig && model.max_mig_devices == 0 {
            return refuse(field("mig"), format!("model `{}` cannot do MIG (maxMigDevices is 0)", gpu.model));
        }
        if !is_pcie_root(&gpu.pcie_root) {
            return refuse(field("pcieRoot"), format!("`{}` is not like `pci0000:16`", gpu.pcie_root));
        }
        resolved.push(Gpu {
            index,
            serial: gpu.serial.unwrap_or_else(|| format!("16{:011}", index + 1)),
            uuid: gpu.uuid,
            minor,
            pci: gpu.pci,
            pcie_root: gpu.pcie_root,
            bridges: gpu.bridges,
            numa_node: gpu.numa_node,
            mig: gpu.mig,
            model: Arc::clone(model),
            links: Vec::new(),
        });
    }
    Ok(resolved)
}

fn is_gpu_uuid(text: &str) -> bool {
    let Some(uuid) = text.strip_prefix("GPU-") else { return false };
    let groups: Vec<&str> = uuid.split('-').collect();
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups.concat().bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_pcie_root(text: &str) -> bool {
    let Some((domain, bus)) = text.strip_prefix("pci").and_then(|rest| rest.split_once(':')) else {
        return false;
    };
    domain.len() == 4 && bus.len() == 2 && (domain.to_owned() + bus).bytes().all(|b| b.is_ascii_hexdigit())
}

impl NvLinkFile {
    /// Gives every GPU its active links, numbered from 0 in order of the peers, switches last.
    fn connect(&self, gpus: &mut [Gpu]) -> Result<(), Refusal> {
        self.check_peers(gpus.len())?;
        for (row, peers) in self.peers.iter().enumerate() {
            for (peer, &count) in peers.iter().enumerate() {
                for _ in 0..count {
                    push_link(&mut gpus[row], NvLinkEnd::Gpu(peer))
                        .map_err(|reason| (format!("nvlink.peers[{row}]"), reason))?;
                }
            }
        }
        for (position, fabric) in self.fabrics.iter().enumerate() {
            fabric.connect(gpus).map_err(|reason| (format!("nvlink.fabrics[{position}]"), reason))?;
        }
        Ok(())
    }

    fn check_peers(&self, gpus: usize) -> Result<(), Refusal> {
        if self.peers.is_empty() {
            return Ok(());
        }
        if self.peers.len() != gpus {
            return refuse("nvlink.peers", format!("{} rows for {gpus} GPUs", self.peers.len()));
        }
        for (row, peers) in self.peers.iter().enumerate() {
            if peers.len() != gpus {
                return refuse(
                    format!("nvlink.peers[{row}]"),
                    format!("{} columns for {gpus} GPUs", peers.len()),
                );
            }
            for (column, &count) in peers.iter().enumerate() {
                let field = format!("nvlink.peers[{row}][{column}]");
                if row == column && count != 0 {
                    return refuse(field, "a GPU has no link to itself");
                }
                // A row of the wrong length is reported when it is its turn.
                if self.peers[column].get(row).is_some_and(|&back| back != count) {
                    return refuse(
                        field,
                        format!("{count} links here, {} the other way", self.peers[column][row]),
                    );
                }
            }
        }
        Ok(())
    }
}

impl Fabric {
    /// All links that a GPU still has go to the switches, evenly.
    fn connect(&self, gpus: &mut [Gpu]) -> Result<(), String> {
        if self.switches.is_empty() {
            return Err("`switches` must name one or more".to_owned());
        }
        for &index in &self.gpus {
            let count = gpus.len();
            let gpu = gpus.get_mut(index).ok_or_else(|| format!("GPU {index} of {count} does not exist"))?;
            for switch in self.switches.iter().cycle().take(gpu.model.nvlinks as usize - gpu.links.len()) {
                push_link(gpu, NvLinkEnd::Switch(*switch))?;
            }
        }
        Ok(())
    }
}

fn push_link(gpu: &mut Gpu, remote: NvLinkEnd) -> Result<(), String> {
    let index = gpu.links.len() as u32;
    if index >= gpu.model.nvlinks || gpu.model.nvlink_version.is_none() {
        return Err(format!("GPU {}: its model has {} NVLinks", gpu.index, gpu.model.nvlinks));
    }
    gpu.links.push(NvLink { index, remote });
    Ok(())
}

#[cfg(test)]
mod tests;
