//! State of this process: the container's shares by GPU, and the costs of what the process holds.

mod binding;
mod driver_counter;
mod gpu;
mod usage;

use core::mem::{MaybeUninit, size_of};
use core::sync::atomic::Ordering;

use tessera_intercept_abi::GpuUuid;
use tessera_intercept_limiter::Refused;

pub(crate) use binding::{Binding, Owner};
pub(crate) use driver_counter::{DriverCounter, GRAPH, LIMIT, POOL, kind};
use gpu::Gpu;
pub(crate) use gpu::{Holder, Memory, Utilization};
pub(crate) use usage::LEAST_NS;

use crate::grants;
use crate::process_page::{GPUS, ProcessPage, process_page};
use crate::share::Share;
use crate::sys::{self, Map};
use crate::table::Table;
use crate::terms::Terms;
use crate::trace::{LastRefusal, Reason, RefusedAllocation};

/// Kinds of charged objects. Each has a table of its own, by its own keys.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Device pointers.
    Pointer = 0,
    /// Physical memory and its handles.
    Physical = 1,
    /// Addresses that physical memory is mapped at.
    Mapping = 2,
    /// Arrays and mipmapped arrays.
    Array = 3,
    /// Pools; `bytes` is the key of the driver counter.
    Pool = 4,
    /// Device pointers of memory from pools; `bytes` is the key of the pool's driver counter.
    Pooled = 5,
    /// Contexts; `holders` counts its attachments.
    Context = 6,
    /// Device pointers of memory of other processes; `holders` counts how often it is open.
    Imported = 7,
    /// Handles of memory of other APIs.
    External = 8,
    /// Executable graphs that allocate memory, a key for each GPU; `context` is the device + 1, and
    /// `holders` is 1 if they have their memory.
    Graph = 9,
}

/// Number of kinds.
const KINDS: usize = 10;

/// State of this process, in memory from the kernel. See [`with_state`].
pub(crate) struct State {
    gpus: [MaybeUninit<Gpu>; GPUS],
    count: usize,
    tables: [Table; KINDS],
    counters: Table<DriverCounter>,
    bindings: Table<Binding>,
    /// Last ticket of a reading.
    tickets: u64,
    refusal: LastRefusal,
    /// UUID by device, once requested.
    devices: [Option<GpuUuid>; GPUS],
    /// Primary context by device, once retained.
    primaries: [usize; GPUS],
    /// True if the container has no directory of grants: HAMi's variables define its limits.
    #[cfg(feature = "hami")]
    by_variables: bool,
}

/// Runs a function on the state of this process, under its lock. It must not call the driver.
/// `None` if there is no memory for a state.
pub(crate) fn with_state<T>(run: impl FnOnce(&mut State) -> T) -> Option<T> {
    let page = process_page()?;
    let result = hold_state(page, run);
    // After the lock is released, because this waits for the host.
    if let Some(pid) = page.host_pid.request_if_due() {
        hold_state(page, |state| state.set_host_pid(pid));
    }
    result
}

fn hold_state<T>(page: &ProcessPage, run: impl FnOnce(&mut State) -> T) -> Option<T> {
    page.lock.hold(|| {
        let mut state = page.state.load(Ordering::Relaxed).cast::<State>();
        if state.is_null() {
            state = State::discover()?;
            page.state.store(state.cast(), Ordering::Relaxed);
        }
        // SAFETY: made by `discover`, never unmapped, and only used under the lock, which is not
        // taken twice: nothing in here calls a driver, and so no hook.
        Some(run(unsafe { &mut *state }))
    })
}

impl State {
    /// Discovers the container's shares. `None` if the kernel has no memory.
    fn discover() -> Option<*mut Self> {
        let state =
            sys::map(Map::Private, size_of::<Self>().next_multiple_of(4096))?.cast::<Self>();
        // SAFETY: a new mapping, zeroed: no GPUs, empty tables, `None`s (whose tag is 0), no
        // contexts.
        let this = unsafe { &mut *state };
        this.devices = [None; GPUS];
        grants::discover(|grant| this.add(Share::new(grant)));
        #[cfg(feature = "hami")]
        {
            this.by_variables = !grants::has_directory();
        }
        Some(state)
    }

    /// Adds a share. A share that there is no room for is ignored.
    fn add(&mut self, share: Option<Share>) {
        let Some(share) = share else { return };
        let uuid = share.gpu();
        let index = match self.known(uuid) {
            Some(index) => index,
            None => {
                let Some(place) = self.gpus.get_mut(self.count) else { return };
                place.write(Gpu::new(uuid));
                self.count += 1;
                self.count - 1
            }
        };
        if let Some(gpu) = self.gpu(index) {
            gpu.add(share);
        }
    }

    /// Returns the number of GPUs that the container has shares of.
    pub(crate) fn gpu_count(&self) -> usize {
        self.count
    }

    /// Returns the index of the GPU with a UUID.
    pub(crate) fn find(&mut self, uuid: GpuUuid) -> Option<usize> {
        let known = self.known(uuid);
        #[cfg(feature = "hami")]
        if known.is_none() && self.by_variables {
            let ordinal = self.devices.iter().position(|device| *device == Some(uuid));
            self.add(crate::hami::share_of(uuid, ordinal));
            return self.known(uuid);
        }
        known
    }

    /// Returns what HAMi's monitor is to see of this process's launches on a GPU: see
    /// [`Share::shown_usage`].
    #[cfg(feature = "hami")]
    pub(crate) fn shown_usage(&mut self, gpu: usize) -> Option<(crate::hami::Shown, usize, u64)> {
        self.gpu(gpu)?.shares().first()?.shown_usage()
    }

    /// Shows HAMi's monitor nothing of this process from now on.
    #[cfg(feature = "hami")]
    pub(crate) fn hide(&mut self) {
        for gpu in 0..self.count {
            self.gpu(gpu).into_iter().flat_map(Gpu::shares).for_each(Share::hide);
        }
    }

    fn known(&mut self, uuid: GpuUuid) -> Option<usize> {
        (0..self.count).find(|index| self.gpu(*index).is_some_and(|gpu| gpu.uuid == uuid))
    }

    /// Returns the UUID of a device, if it is known.
    pub(crate) fn device_uuid(&self, device: i32) -> Option<GpuUuid> {
        *self.devices.get(usize::try_from(device).ok()?)?
    }

    /// Stores the UUID of a device.
    pub(crate) fn set_device_uuid(&mut self, device: i32, uuid: GpuUuid) {
        if let Some(place) =
            usize::try_from(device).ok().and_then(|device| self.devices.get_mut(device))
        {
            *place = Some(uuid);
        }
    }

    /// Returns the primary context of a device, to be read or changed.
    pub(crate) fn primary(&mut self, device: i32) -> Option<&mut usize> {
        self.primaries.get_mut(usize::try_from(device).ok()?)
    }

    /// Returns the costs of one kind of objects.
    pub(crate) fn table(&mut self, kind: Kind) -> &mut Table {
        let [
            pointers,
            physical,
            mappings,
            arrays,
            pools,
            pooled,
            contexts,
            imported,
            external,
            graphs,
        ] = &mut self.tables;
        match kind {
            Kind::Pointer => pointers,
            Kind::Physical => physical,
            Kind::Mapping => mappings,
            Kind::Array => arrays,
            Kind::Pool => pools,
            Kind::Pooled => pooled,
            Kind::Context => contexts,
            Kind::Imported => imported,
            Kind::External => external,
            Kind::Graph => graphs,
        }
    }

    /// Returns the counters of the CUDA driver.
    pub(crate) fn counters(&mut self) -> &mut Table<DriverCounter> {
        &mut self.counters
    }

    /// Returns the bindings of physical memory.
    pub(crate) fn bindings(&mut self) -> &mut Table<Binding> {
        &mut self.bindings
    }

    /// Returns a number that was never returned before.
    pub(crate) fn next_ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    /// Takes memory of a GPU.
    ///
    /// # Errors
    /// The memory is not granted.
    pub(crate) fn reserve(&mut self, index: usize, bytes: u64) -> Result<(), Refused> {
        let Some(gpu) = self.gpu(index) else { return Err(Refused::Limit) };
        gpu.reserve(bytes).map_err(|refused| self.refuse(index, bytes, refused))
    }

    /// Counts and stores a refusal.
    fn refuse(&mut self, index: usize, bytes: u64, refused: Refused) -> Refused {
        let Some(gpu) = self.gpu(index) else { return refused };
        let Memory { used, limit, .. } = gpu.memory();
        let reason = match refused {
            Refused::Limit => Reason::Limit { used, limit },
            Refused::Tampered => Reason::Unusable,
        };
        if let Some(first) = gpu.shares().first().filter(|_| refused == Refused::Limit) {
            first.count_refusal(bytes, used);
        }
        let gpu = gpu.uuid;
        self.refusal.put(RefusedAllocation { gpu, bytes, reason });
        refused
    }

    /// Stores the refusal of memory of a GPU that the container has no share of.
    pub(crate) fn refuse_without_share(&mut self, uuid: GpuUuid, bytes: u64) {
        self.refusal.put(RefusedAllocation { gpu: uuid, bytes, reason: Reason::NoShare });
    }

    /// Returns the last refusal.
    pub(crate) fn last_refusal(&mut self) -> &mut LastRefusal {
        &mut self.refusal
    }

    /// Charges a context that is about to be created. The first context of a process on a GPU is
    /// part of the process's account until it ends.
    ///
    /// # Errors
    /// The memory is not granted.
    pub(crate) fn begin_context(&mut self, index: usize) -> Result<(), Refused> {
        let bytes = self.gpu(index).map_or(0, |gpu| gpu.next_context_bytes());
        self.reserve(index, bytes)?;
        if let Some(gpu) = self.gpu(index) {
            gpu.begin_context();
        }
        Ok(())
    }

    /// A context has ended, or was not created.
    pub(crate) fn end_context(&mut self, index: usize) {
        if let Some(gpu) = self.gpu(index) {
            gpu.end_context();
        }
    }

    /// Releases memory of a GPU.
    pub(crate) fn release(&mut self, index: usize, bytes: u64) {
        if let Some(gpu) = self.gpu(index) {
            gpu.release(bytes);
        }
    }

    /// Returns memory of a GPU by its grants and ledgers; nothing without a grant.
    pub(crate) fn memory(&mut self, uuid: GpuUuid) -> Memory {
        let Some(gpu) = self.find(uuid).and_then(|index| self.gpu(index)) else {
            return Memory::NONE;
        };
        gpu.shares().iter_mut().for_each(Share::reclaim_for_report);
        gpu.memory()
    }

    /// Updates the utilization of a GPU. `None` without a share.
    pub(crate) fn update_usage(&mut self, uuid: GpuUuid, now: u64) -> Option<Utilization> {
        let index = self.find(uuid)?;
        self.gpu(index)?.update_usage(now)
    }

    /// Returns true if memory of a GPU may spill to the host. One grant that allows it is enough:
    /// its part of the limit may be beyond the memory of the GPU.
    pub(crate) fn may_spill(&mut self, index: usize) -> bool {
        self.shares(index).iter_mut().any(Share::may_spill)
    }

    /// Returns true if it is relevant and unknown if this process uses a GPU through MPS.
    pub(crate) fn needs_mps_check(&mut self, index: usize) -> bool {
        self.shares(index).iter().any(Share::needs_mps_check)
    }

    /// Notes if MPS limits this process on a GPU to the percentage of its shares together.
    pub(crate) fn note_mps(&mut self, index: usize, is_client: impl Fn(u32) -> bool) {
        let shares = self.shares(index);
        let percent = shares.iter().map(Share::percent_by_mps).fold(0, u32::saturating_add);
        let is_client = is_client(percent);
        shares.iter_mut().for_each(|share| share.note_mps(is_client));
    }

    /// Returns the terms of launches on a GPU. `None` without a share, or without a slot in the
    /// ledger.
    pub(crate) fn terms(&mut self, index: usize) -> Option<Terms> {
        self.gpu(index)?.terms()
    }

    /// Calls `found` with the processes of a PID namespace that have used a GPU.
    pub(crate) fn each_holder(&mut self, uuid: GpuUuid, namespace: u64, found: impl FnMut(Holder)) {
        if let Some(gpu) = self.find(uuid).and_then(|index| self.gpu(index)) {
            gpu.each_holder(namespace, found);
        }
    }

    /// Writes the host's PID of this process into its slots.
    fn set_host_pid(&mut self, pid: u32) {
        for index in 0..self.count {
            self.shares(index).iter().for_each(|share| share.set_host_pid(pid));
        }
    }

    /// Returns the shares of a GPU.
    pub(crate) fn shares(&mut self, index: usize) -> &mut [Share] {
        self.gpu(index).map_or(&mut [], |gpu| gpu.shares())
    }

    fn gpu(&mut self, index: usize) -> Option<&mut Gpu> {
        let place = self.gpus.get_mut(..self.count)?.get_mut(index)?;
        // SAFETY: the first `count` were written.
        Some(unsafe { place.assume_init_mut() })
    }
}
