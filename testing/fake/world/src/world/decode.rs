//! Format of the file, and validation of its fields.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use serde::Deserialize;

use super::{Driver, Gpu, MAX_GPUS, NvLink, NvLinkEnd, TimeModel, World, cuda_number};
use crate::mig::MigTable;
use crate::model::Model;
use crate::pci::PciAddress;

/// Content of `world.yaml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct WorldFile {
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
    /// Number of links between each pair of GPUs, a row and a column per GPU.
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

/// Path of the field, and the error.
pub(super) type FieldError = (String, String);

fn field_error<T>(field: impl Into<String>, reason: impl Into<String>) -> Result<T, FieldError> {
    Err((field.into(), reason.into()))
}

impl WorldFile {
    pub(super) fn resolve(self) -> Result<World, FieldError> {
        let Self { driver, time, models, cpus, gpus, nvlink } = self;
        if cuda_number(&driver.cuda).is_none() {
            return field_error("driver.cuda", format!("`{}` is not `major.minor`", driver.cuda));
        }
        if !(time.scale >= 0.0 && time.scale.is_finite()) {
            return field_error("time.scale", "must be 0 or more");
        }
        let models = check_models(models)?;
        if gpus.len() > MAX_GPUS {
            return field_error(
                "gpus",
                format!("{} GPUs; at most {MAX_GPUS} are supported", gpus.len()),
            );
        }
        let mut gpus = resolve_gpus(gpus, &models)?;
        nvlink.connect(&mut gpus)?;
        let switches = nvlink.fabrics.into_iter().flat_map(|fabric| fabric.switches).collect();
        Ok(World { driver, time, gpus, cpus, switches })
    }
}

fn check_models(
    models: BTreeMap<String, Model>,
) -> Result<BTreeMap<String, Arc<Model>>, FieldError> {
    for (key, model) in &models {
        if model.memory_mib < model.reserved_mib + model.context_mib {
            let reason = format!("{} MiB do not hold reservedMiB and contextMiB", model.memory_mib);
            return field_error(format!("models.{key}.memoryMiB"), reason);
        }
        if model.multiprocessors == 0 {
            return field_error(format!("models.{key}.multiprocessors"), "must be 1 or more");
        }
        if let Some(table) =
            model.mig_table.as_deref().filter(|name| MigTable::of_model(name).is_none())
        {
            let known: Vec<&str> = MigTable::models().collect();
            let reason = format!("`{table}` is not one of {}", known.join(", "));
            return field_error(format!("models.{key}.migTable"), reason);
        }
        // The length of NVML's name buffer, with its terminating zero.
        if model.name.is_empty() || model.name.len() >= 96 {
            return field_error(format!("models.{key}.name"), "must have 1 to 95 characters");
        }
    }
    Ok(models.into_iter().map(|(key, model)| (key, Arc::new(model))).collect())
}

fn resolve_gpus(
    gpus: Vec<GpuFile>,
    models: &BTreeMap<String, Arc<Model>>,
) -> Result<Vec<Gpu>, FieldError> {
    let (mut uuids, mut addresses, mut minors) = (HashSet::new(), HashSet::new(), HashSet::new());
    let mut resolved = Vec::with_capacity(gpus.len());
    for (index, gpu) in gpus.into_iter().enumerate() {
        let field = |name: &str| format!("gpus[{index}].{name}");
        let Some(model) = models.get(&gpu.model) else {
            return field_error(field("model"), format!("`{}` is not among `models`", gpu.model));
        };
        if !is_gpu_uuid(&gpu.uuid) {
            return field_error(
                field("uuid"),
                format!("`{}` is not `GPU-` and a lower-case UUID", gpu.uuid),
            );
        }
        if !uuids.insert(gpu.uuid.clone()) {
            return field_error(field("uuid"), format!("`{}` is used twice", gpu.uuid));
        }
        if !addresses.insert(gpu.pci) {
            return field_error(field("pci"), format!("`{}` is used twice", gpu.pci));
        }
        let minor = gpu.minor.unwrap_or(index as u32);
        if !minors.insert(minor) {
            return field_error(field("minor"), format!("{minor} is used twice"));
        }
        if gpu.mig && model.max_mig_devices == 0 {
            return field_error(
                field("mig"),
                format!("model `{}` cannot do MIG (maxMigDevices is 0)", gpu.model),
            );
        }
        if !is_pcie_root(&gpu.pcie_root) {
            return field_error(
                field("pcieRoot"),
                format!("`{}` is not like `pci0000:16`", gpu.pcie_root),
            );
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
    domain.len() == 4
        && bus.len() == 2
        && (domain.to_owned() + bus).bytes().all(|b| b.is_ascii_hexdigit())
}

impl NvLinkFile {
    /// Sets the active links of every GPU, numbered from 0 in order of the peers, switches last.
    fn connect(&self, gpus: &mut [Gpu]) -> Result<(), FieldError> {
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
            fabric
                .connect(gpus)
                .map_err(|reason| (format!("nvlink.fabrics[{position}]"), reason))?;
        }
        Ok(())
    }

    fn check_peers(&self, gpus: usize) -> Result<(), FieldError> {
        if self.peers.is_empty() {
            return Ok(());
        }
        if self.peers.len() != gpus {
            return field_error(
                "nvlink.peers",
                format!("{} rows for {gpus} GPUs", self.peers.len()),
            );
        }
        for (row, peers) in self.peers.iter().enumerate() {
            if peers.len() != gpus {
                return field_error(
                    format!("nvlink.peers[{row}]"),
                    format!("{} columns for {gpus} GPUs", peers.len()),
                );
            }
            for (column, &count) in peers.iter().enumerate() {
                let field = format!("nvlink.peers[{row}][{column}]");
                if row == column && count != 0 {
                    return field_error(field, "a GPU has no link to itself");
                }
                // A row of the wrong length is reported in its own iteration.
                if self.peers[column].get(row).is_some_and(|&back| back != count) {
                    return field_error(
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
    /// Connects all remaining links of each GPU to the switches, evenly.
    fn connect(&self, gpus: &mut [Gpu]) -> Result<(), String> {
        if self.switches.is_empty() {
            return Err("`switches` must name one or more".to_owned());
        }
        for &index in &self.gpus {
            let count = gpus.len();
            let gpu = gpus
                .get_mut(index)
                .ok_or_else(|| format!("GPU {index} of {count} does not exist"))?;
            for switch in
                self.switches.iter().cycle().take(gpu.model.nvlinks as usize - gpu.links.len())
            {
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
