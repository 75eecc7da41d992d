//! A fake GPU library, whose GPUs the test sets.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use tessera_api::{
    gpu::{
        ComputeCapability, CudaVersion, Gpu, Health, Inventory, Mig, Unpublished, UnpublishedReason,
    },
    names::GpuUuid,
};
use tessera_gpu::{
    CapabilityNode, ComputeInstance, GpuInstance, GpuLibrary, GpuMemory, GpuProcess, HealthEvent,
    HealthEventKind, HealthWatch, LibraryError, MigLibrary, MigLibraryError, ProcessUtilization,
    RecoveryAction,
};

/// Returns the UUID of the GPU with this number.
pub fn uuid(number: u32) -> GpuUuid {
    GpuUuid::new(format!("GPU-00000000-0000-0000-0000-{number:012}")).expect("a UUID")
}

/// Returns a GPU of 16 GiB.
pub fn gpu(number: u32) -> Gpu {
    Gpu {
        uuid: uuid(number),
        index: number,
        minor: number,
        product_name: "NVIDIA T4".into(),
        architecture: "Turing".into(),
        memory_bytes: 16 << 30,
        cuda_compute_capability: ComputeCapability { major: 7, minor: 5 },
        driver_version: "580.95.05".into(),
        cuda_driver_version: CudaVersion { major: 13, minor: 0 },
        pci_bus_id: format!("0000:{number:02x}:00.0").parse().expect("an address"),
        pcie_root: None,
        numa_node: None,
        mig: None,
        health: Health::Healthy,
    }
}

/// The GPUs, or `None` if there is no library.
#[derive(Default)]
struct State {
    inventory: Option<Inventory>,
    /// The GPUs after a change that the library does not know yet.
    plugged: Option<Inventory>,
    /// Watches that are held.
    watches: usize,
    events: VecDeque<HealthEvent>,
    /// Processes by GPU. `None` if the GPU does not report them.
    processes: BTreeMap<GpuUuid, Option<Vec<GpuProcess>>>,
    /// Utilization in percent by GPU and PID. GPUs that are not in it do not report it.
    utilization: BTreeMap<GpuUuid, BTreeMap<u32, u32>>,
    /// GPUs without new samples of utilization.
    idle: BTreeSet<GpuUuid>,
    /// Age of the samples, `None` if it is unknown.
    sample_age: Option<Duration>,
}

/// The library. Clones share it.
#[derive(Clone, Default)]
pub struct FakeGpus {
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl FakeGpus {
    /// Returns a library with this number of GPUs.
    pub fn with_gpus(count: u32) -> Self {
        let machine = Self::default();
        let inventory = Inventory::new((0..count).map(gpu).collect(), vec![], vec![]);
        machine.change(|state| state.inventory = Some(inventory));
        machine
    }

    /// Binds GPUs to the kernel driver, or unbinds some: this number is bound then.
    pub fn plug(&self, count: u32) {
        let inventory = Inventory::new((0..count).map(gpu).collect(), vec![], vec![]);
        self.change(|state| state.plugged = Some(inventory));
    }

    /// Loses a GPU from the bus.
    pub fn lose(&self, number: u32) {
        self.change(|state| {
            let inventory = state.inventory.clone().expect("a library");
            let left = inventory.gpus.into_iter().filter(|gpu| gpu.uuid != uuid(number)).collect();
            let lost = Unpublished {
                uuid: Some(uuid(number)),
                index: None,
                pci_bus_id: None,
                reason: UnpublishedReason::Lost,
            };
            state.inventory = Some(Inventory::new(left, inventory.links, vec![lost]));
            state.events.push_back(HealthEvent { gpu: uuid(number), kind: HealthEventKind::Lost });
        });
    }

    /// Puts a GPU into MIG mode, in a library that leaves MIG alone.
    pub fn enable_mig(&self, number: u32) {
        self.change(|state| {
            let inventory = state.inventory.as_mut().expect("a library");
            let gpu = inventory.gpus.iter_mut().find(|gpu| gpu.uuid == uuid(number));
            gpu.expect("a GPU").mig = Some(Mig { profiles: vec![], instances: vec![] });
        });
    }

    /// Sets the processes that hold memory of a GPU.
    pub fn hold(&self, number: u32, processes: &[GpuProcess]) {
        self.change(|state| drop(state.processes.insert(uuid(number), Some(processes.to_vec()))));
    }

    /// Sets the utilization of a GPU by its processes, in percent.
    pub fn work(&self, number: u32, percent: &[(u32, u32)]) {
        let percent = percent.iter().copied().collect();
        self.change(|state| {
            state.idle.remove(&uuid(number));
            state.utilization.insert(uuid(number), percent);
        });
    }

    /// Sets the age of the samples of utilization at each reading.
    pub fn sampled(&self, age: Duration) {
        self.change(|state| state.sample_age = Some(age));
    }

    /// Lets a GPU have no new samples of utilization: no process works.
    pub fn idle(&self, number: u32) {
        self.work(number, &[]);
        self.change(|state| {
            state.idle.insert(uuid(number));
        });
    }

    /// Stops reporting the processes of a GPU.
    pub fn hide_processes(&self, number: u32) {
        self.change(|state| drop(state.processes.insert(uuid(number), None)));
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.0.lock().expect("no panic"));
        self.shared.1.notify_all();
    }
}

impl GpuLibrary for FakeGpus {
    fn inventory(&self) -> Result<Inventory, LibraryError> {
        let mut state = self.shared.0.lock().expect("no panic");
        // As NVML, which looks again once all its users have shut it down.
        if state.watches == 0
            && let Some(inventory) = state.plugged.take()
        {
            state.inventory = Some(inventory);
        }
        state.inventory.clone().ok_or(LibraryError::Lost { gpu: uuid(0) })
    }

    fn is_outdated(&self) -> bool {
        self.shared.0.lock().expect("no panic").plugged.is_some()
    }

    fn memory(&self, gpu: &GpuUuid) -> Result<GpuMemory, LibraryError> {
        Err(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, LibraryError> {
        let state = self.shared.0.lock().expect("no panic");
        state
            .processes
            .get(gpu)
            .cloned()
            .unwrap_or(Some(vec![]))
            .ok_or(LibraryError::Lost { gpu: gpu.clone() })
    }

    fn utilization(
        &self,
        gpu: &GpuUuid,
        since_us: u64,
    ) -> Result<Option<ProcessUtilization>, LibraryError> {
        let state = self.shared.0.lock().expect("no panic");
        let percent = state.utilization.get(gpu).cloned();
        let last_us = since_us + u64::from(!state.idle.contains(gpu));
        Ok(percent.map(|percent| ProcessUtilization { last_us, age: state.sample_age, percent }))
    }

    fn busy_percent(&self, gpu: &GpuUuid) -> Result<Option<u8>, LibraryError> {
        let state = self.shared.0.lock().expect("no panic");
        let percent = state.utilization.get(gpu);
        let sum = percent.map(|percent| percent.values().sum::<u32>());
        Ok(sum.map(|sum| u8::try_from(sum).map_or(100, |sum| sum.min(100))))
    }

    fn recovery_action(&self, _: &GpuUuid) -> Result<Option<RecoveryAction>, LibraryError> {
        Ok(None)
    }

    fn watch(&self, _: &[GpuUuid]) -> Result<Box<dyn HealthWatch>, LibraryError> {
        self.change(|state| state.watches += 1);
        Ok(Box::new(FakeWatch(self.clone())))
    }
}

/// A watch of all GPUs.
struct FakeWatch(FakeGpus);

impl Drop for FakeWatch {
    fn drop(&mut self) {
        self.0.change(|state| state.watches -= 1);
    }
}

impl HealthWatch for FakeWatch {
    fn wait(&mut self, timeout: Duration) -> Result<Vec<HealthEvent>, LibraryError> {
        let (state, changed) = &*self.0.shared;
        let state = state.lock().expect("no panic");
        let (mut state, _) = changed
            .wait_timeout_while(state, timeout, |state| state.events.is_empty())
            .expect("no panic");
        Ok(state.events.drain(..).collect())
    }
}

/// GPUs of this library are not in MIG mode.
impl MigLibrary for FakeGpus {
    fn gpu_instances(&self, _: &GpuUuid, _: u32) -> Result<Vec<GpuInstance>, MigLibraryError> {
        Ok(Vec::new())
    }

    fn create_gpu_instance(&self, gpu: &GpuUuid, _: u32, _: u32) -> Result<u32, MigLibraryError> {
        Err(MigLibraryError::ModeOff { gpu: gpu.clone() })
    }

    fn create_compute_instance(
        &self,
        gpu: &GpuUuid,
        _: u32,
    ) -> Result<ComputeInstance, MigLibraryError> {
        Err(MigLibraryError::ModeOff { gpu: gpu.clone() })
    }

    fn destroy_gpu_instance(&self, _: &GpuUuid, _: u32) -> Result<(), MigLibraryError> {
        Ok(())
    }

    fn capability_nodes(
        &self,
        gpu: &GpuUuid,
        _: u32,
        _: u32,
    ) -> Result<[CapabilityNode; 2], MigLibraryError> {
        Err(MigLibraryError::ModeOff { gpu: gpu.clone() })
    }
}
