//! The world, what happens to it, and what processes hold, in one.

use std::path::Path;
use std::sync::Arc;

use crate::control::{Control, ControlFile};
use crate::locate::{LocateError, Location};
use crate::usage::{ProcessUse, Usage, UsageError};
use crate::world::{Gpu, World, WorldError};

/// Why a machine could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// No world.
    #[error("the fake GPU libraries have no world")]
    Locate(#[from] LocateError),
    /// A bad world.
    #[error("the fake GPU libraries cannot use their world")]
    World(#[from] WorldError),
    /// The shared state cannot be used.
    #[error("the fake GPU libraries cannot keep their state")]
    Usage(#[from] UsageError),
}

/// What a fake library works on. Open it once per process and library.
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
    /// All of it.
    pub total: u64,
    /// What driver and firmware keep.
    pub reserved: u64,
    /// What processes hold.
    pub used: u64,
    /// What can be had.
    pub free: u64,
}

impl Machine {
    /// Opens the world of this process.
    ///
    /// # Errors
    /// There is none, it is malformed, or its state directory cannot be used.
    pub fn open() -> Result<Self, MachineError> {
        Self::open_at(&Location::of_this_process()?)
    }

    /// Opens the world at that location.
    ///
    /// # Errors
    /// It is malformed, or its state directory cannot be used.
    pub fn open_at(location: &Location) -> Result<Self, MachineError> {
        let world = World::load(&location.world)?;
        let usage = Usage::open(&location.state, &world)?;
        let visible = visible(&world, location.device_nodes.as_deref());
        Ok(Self { world, control: ControlFile::new(&location.control), usage, visible })
    }

    /// Indices of the GPUs that this process may use, in order: as with the real driver, those
    /// whose device nodes it can see. All of them where the driver root has no nodes at all.
    pub fn visible(&self) -> &[usize] {
        &self.visible
    }

    /// What the machine is.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// What happens to it now. Costs a `stat`; take it once per call.
    pub fn control(&self) -> Arc<Control> {
        self.control.read()
    }

    /// What processes hold, to be charged by the fake CUDA.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Memory of a GPU: every living process of the world, and foreign ones.
    pub fn memory(&self, gpu: &Gpu) -> MemoryState {
        let total = gpu.model.memory_bytes();
        let reserved = gpu.model.reserved_bytes();
        let held =
            self.usage.total(gpu.index).saturating_add(self.control().foreign_bytes(&gpu.uuid));
        let used = held.min(gpu.model.usable_bytes());
        MemoryState { total, reserved, used, free: total - reserved - used }
    }

    /// Bytes of a GPU that processes of this world may hold between them: what foreign ones leave.
    /// The limit to charge against with [`Usage::take`].
    pub fn capacity(&self, gpu: &Gpu) -> u64 {
        gpu.model.usable_bytes().saturating_sub(self.control().foreign_bytes(&gpu.uuid))
    }

    /// Processes that hold memory on a GPU and that this process can name: foreign ones and those
    /// of the world.
    pub fn processes(&self, gpu: &Gpu) -> Vec<ProcessUse> {
        let control = self.control();
        let foreign = control
            .gpu(&gpu.uuid)
            .map(|condition| condition.processes.as_slice())
            .unwrap_or_default();
        let foreign = foreign.iter().map(|process| ProcessUse {
            pid: process.pid,
            name: process.name.clone(),
            bytes: process.used_mib * 1024 * 1024,
        });
        foreign.chain(self.usage.processes(gpu.index)).collect()
    }

    /// Whether MIG is on, by the control file or else the world.
    pub fn mig(&self, gpu: &Gpu) -> bool {
        self.control().gpu(&gpu.uuid).and_then(|condition| condition.mig).unwrap_or(gpu.mig)
    }

    /// Whether the GPU fell off the bus.
    pub fn is_lost(&self, gpu: &Gpu) -> bool {
        self.control().is_lost(&gpu.uuid)
    }
}

/// A container gets the node of the driver itself, `nvidiactl`, and of each GPU that it is given.
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
    fn a_process_sees_the_gpus_whose_device_nodes_it_has() {
        let root = tempfile::tempdir().unwrap();
        let nodes = root.path().join("dev");
        std::fs::create_dir(&nodes).unwrap();
        let world = World::parse(shipped::H100_8_NVSWITCH, "h100-8-nvswitch").unwrap();
        assert_eq!(visible(&world, Some(&nodes)).len(), 8, "no nodes at all: nothing to go by");

        for name in ["nvidiactl", "nvidia2", "nvidia5"] {
            std::fs::write(nodes.join(name), "").unwrap();
        }
        assert_eq!(visible(&world, Some(&nodes)), [2, 5]);
        assert_eq!(visible(&world, None).len(), 8);
    }
}
