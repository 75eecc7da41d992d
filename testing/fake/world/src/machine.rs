//! A machine: its world, its condition, and its memory usage.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;

use crate::control::{Control, ControlFile};
use crate::locate::Location;
use crate::mig::{MigError, MigState, MigTable, NodeMig};
use crate::usage::{ProcessUsage, Usage};
use crate::world::{Gpu, World};

/// A machine of a fake library. Opened once per process and library.
#[derive(Debug)]
pub struct Machine {
    world: World,
    control: ControlFile,
    usage: Usage,
    visible: Vec<usize>,
}

/// Memory of one GPU in bytes. `used + free + reserved == total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryState {
    /// Total memory.
    pub total: u64,
    /// Reserve of driver and firmware.
    pub reserved: u64,
    /// Memory held by processes.
    pub used: u64,
    /// Memory that can be allocated.
    pub free: u64,
}

impl Machine {
    /// Opens the world of this process.
    ///
    /// # Errors
    /// Returns an error if there is no world, it is malformed, or its state directory cannot be
    /// used.
    pub fn open() -> anyhow::Result<Self> {
        let location = Location::of_this_process();
        Self::open_at(&location.context("cannot find the world of the fake GPU libraries")?)
    }

    /// Opens the world at a location.
    ///
    /// # Errors
    /// Returns an error if the world is malformed or its state directory cannot be used.
    pub fn open_at(location: &Location) -> anyhow::Result<Self> {
        let world = World::load(&location.world)?;
        let usage = Usage::open(&location.state, &world)?;
        let visible = visible(&world, location.device_nodes.as_deref());
        Ok(Self { world, control: ControlFile::new(&location.control), usage, visible })
    }

    /// Returns the indexes of the GPUs that this process may use, sorted. As with the real driver,
    /// these are the GPUs whose device nodes are visible. All GPUs if the driver root has no
    /// nodes.
    pub fn visible(&self) -> &[usize] {
        &self.visible
    }

    /// Returns the world.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Returns the current condition. Costs a `stat`; call it once per function.
    pub fn control(&self) -> Arc<Control> {
        self.control.read()
    }

    /// Returns the usage, which the fake CUDA charges.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Returns the memory of a GPU, with all living processes of the world and foreign ones.
    pub fn memory(&self, gpu: &Gpu) -> MemoryState {
        let total = gpu.model.memory_bytes();
        let reserved = gpu.model.reserved_bytes();
        let held =
            self.usage.total(gpu.index).saturating_add(self.control().foreign_bytes(&gpu.uuid));
        let used = held.min(gpu.model.usable_bytes());
        MemoryState { total, reserved, used, free: total - reserved - used }
    }

    /// Returns the bytes of a GPU that processes of this world can use: the memory without that of
    /// foreign processes. The limit for [`Usage::charge`].
    pub fn capacity(&self, gpu: &Gpu) -> u64 {
        gpu.model.usable_bytes().saturating_sub(self.control().foreign_bytes(&gpu.uuid))
    }

    /// Returns the processes that hold memory on a GPU and have a PID here: foreign ones and those
    /// of the world.
    pub fn processes(&self, gpu: &Gpu) -> Vec<ProcessUsage> {
        let control = self.control();
        let foreign = control
            .gpu(&gpu.uuid)
            .map(|condition| condition.processes.as_slice())
            .unwrap_or_default();
        let foreign = foreign.iter().map(|process| ProcessUsage {
            pid: process.pid,
            name: process.name.clone(),
            bytes: process.used_mib * 1024 * 1024,
            gpu_ns: None,
        });
        foreign.chain(self.usage.processes(gpu.index)).collect()
    }

    /// Returns true if MIG is enabled, by the control file or else by the world.
    pub fn mig(&self, gpu: &Gpu) -> bool {
        NodeMig::new(&self.control).is_enabled(gpu)
    }

    /// Returns the MIG profiles of a GPU in MIG mode.
    ///
    /// # Errors
    /// [`MigError::NotSupported`]: MIG mode is off, or the model has no profiles.
    pub fn mig_table(&self, gpu: &Gpu) -> Result<Arc<MigTable>, MigError> {
        NodeMig::new(&self.control).table(gpu)
    }

    /// Returns the MIG instances of a GPU.
    pub fn mig_state(&self, gpu: &Gpu) -> MigState {
        NodeMig::new(&self.control).state(gpu)
    }

    /// Changes the MIG instances of a GPU in MIG mode.
    ///
    /// # Errors
    /// The error of `change`, or of [`NodeMig::change`].
    pub fn change_mig<T>(
        &self,
        gpu: &Gpu,
        change: impl FnOnce(&mut MigState, &MigTable) -> Result<T, MigError>,
    ) -> Result<T, MigError> {
        NodeMig::new(&self.control).change(gpu, change)
    }

    /// Returns true if the GPU fell off the bus.
    pub fn is_lost(&self, gpu: &Gpu) -> bool {
        self.control().is_lost(&gpu.uuid)
    }
}

/// Returns the visible GPUs. A container has the node `nvidiactl` of the driver, and one node per
/// GPU.
fn visible(world: &World, device_nodes: Option<&Path>) -> Vec<usize> {
    let nodes = device_nodes.filter(|nodes| nodes.join("nvidiactl").exists());
    let has_node =
        |gpu: &&Gpu| nodes.is_none_or(|nodes| nodes.join(format!("nvidia{}", gpu.minor)).exists());
    world.gpus.iter().filter(has_node).map(|gpu| gpu.index).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shipped;

    #[test]
    fn visible_gpus_are_those_with_device_nodes() {
        let root = tempfile::tempdir().unwrap();
        let nodes = root.path().join("dev");
        std::fs::create_dir(&nodes).unwrap();
        let world = World::parse(shipped::H100_8_NVSWITCH, "h100-8-nvswitch").unwrap();
        assert_eq!(visible(&world, Some(&nodes)).len(), 8, "no nodes at all");

        for name in ["nvidiactl", "nvidia2", "nvidia5"] {
            std::fs::write(nodes.join(name), "").unwrap();
        }
        assert_eq!(visible(&world, Some(&nodes)), [2, 5]);
        assert_eq!(visible(&world, None).len(), 8);
    }
}
