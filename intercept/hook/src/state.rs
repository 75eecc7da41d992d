//! What this process knows: the container's shares by GPU, and what its pointers cost.

use core::mem::{MaybeUninit, size_of};

use tessera_intercept_abi::{GpuUuid, LedgerPage};
use tessera_intercept_limiter::{Refused, release_across, reserve_across};

use crate::bind::Binding;
use crate::compute::Terms;
use crate::gauge::Gauge;
use crate::grants;
use crate::pointers::Table;
use crate::processes::Holder;
use crate::shares::Share;
use crate::sys::{self, Map};
use crate::trace::{self, LastRefusal, Reason};
use crate::utilization::Usage;

/// GPUs that a container can have shares of.
pub(crate) const GPUS: usize = 64;
/// Shares of one GPU that a container can have.
const SHARES: usize = 16;

/// Kinds of things that are charged; each counts keys of its own.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Device pointers.
    Pointer = 0,
    /// Handles of physical memory; the cost is that of the memory, wherever else it is held.
    Physical = 1,
    /// Addresses that physical memory is mapped at.
    Mapping = 2,
    /// Arrays and mipmapped arrays.
    Array = 3,
    /// Pools; `bytes` is the key of the gauge.
    Pool = 4,
    /// Device pointers that came from pools; `bytes` is the key of the pool's gauge, which pays.
    Pooled = 5,
    /// Contexts; `holders` is how often they are attached.
    Context = 6,
    /// Device pointers of memory of other processes; `holders` is how often it is open.
    Imported = 7,
    /// Handles of memory of other APIs.
    External = 8,
    /// Executable graphs that take memory, a key for each GPU; `context` is the device + 1, and
    /// `holders` says whether they have it.
    Graph = 9,
}

/// How many kinds there are.
const KINDS: usize = 10;

/// One GPU.
struct Gpu {
    uuid: GpuUuid,
    shares: [MaybeUninit<Share>; SHARES],
    count: usize,
    /// Contexts of this process on it.
    contexts: u32,
    /// What each context but the first is charged with; known with the first.
    context_bytes: u64,
    /// Its utilization, once asked for.
    usage: *mut Usage,
}

/// Memory of a GPU as the container is to see it.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    /// What its grants say.
    pub(crate) limit: u64,
    /// What its processes hold, with what the CUDA driver takes by itself.
    pub(crate) used: u64,
    /// Plain memory spills to the host, so that there may be more than the GPU has.
    pub(crate) spills: bool,
}

impl Memory {
    /// Of a GPU without a grant.
    pub(crate) const NOTHING: Self = Self { limit: 0, used: 0, spills: false };

    /// Bytes in total, of a GPU that has so many.
    pub(crate) fn total_of(self, physical: u64) -> u64 {
        if self.spills { self.limit } else { self.limit.min(physical) }
    }

    /// Bytes that can be had, of a GPU that has so many left.
    pub(crate) fn free_of(self, physical: u64) -> u64 {
        let granted = self.limit.saturating_sub(self.used);
        if self.spills { granted } else { granted.min(physical) }
    }
}

/// Memory of a GPU as its shares say.
fn memory_of(shares: &mut [Share]) -> Memory {
    shares.iter_mut().fold(Memory::NOTHING, |sum, share| Memory {
        limit: sum.limit.saturating_add(share.limit()),
        used: sum.used.saturating_add(share.overhead().used_of(share.used())),
        spills: sum.spills || share.may_spill(),
    })
}

/// Everything. Lives in memory of the kernel's, which begins zeroed; see [`State::discover`].
pub(crate) struct State {
    gpus: [MaybeUninit<Gpu>; GPUS],
    count: usize,
    tables: [Table; KINDS],
    /// What the driver counts itself.
    gauges: Table<Gauge>,
    /// What keeps physical memory beside its handles and mappings.
    bindings: Table<Binding>,
    /// The last ticket of a reading.
    tickets: u64,
    /// The last refusal of memory.
    refusal: LastRefusal,
    /// By device: its UUID, once asked for.
    devices: [Option<GpuUuid>; GPUS],
    /// By device: its primary context, once retained.
    primaries: [usize; GPUS],
    /// There is no place for grants: variables say what may be taken.
    #[cfg(feature = "hami")]
    by_variables: bool,
}

impl State {
    /// Looks for the container's shares. `None` where the kernel has no memory.
    pub(crate) fn discover() -> Option<*mut Self> {
        let state =
            sys::map(Map::Private, size_of::<Self>().next_multiple_of(4096))?.cast::<Self>();
        // SAFETY: a new mapping, zeroed: no GPUs, empty tables, `None`s (whose tag is 0), no
        // contexts.
        let this = unsafe { &mut *state };
        this.devices = [None; GPUS];
        grants::discover(|share| this.add(share));
        #[cfg(feature = "hami")]
        {
            this.by_variables = !grants::are_given();
        }
        Some(state)
    }

    /// A share that there is no room for does not count.
    fn add(&mut self, share: Share) {
        let uuid = share.gpu();
        let gpu = match self.known(uuid) {
            Some(index) => index,
            None => {
                let Some(place) = self.gpus.get_mut(self.count) else { return };
                place.write(Gpu {
                    uuid,
                    shares: [const { MaybeUninit::uninit() }; SHARES],
                    count: 0,
                    contexts: 0,
                    context_bytes: 0,
                    usage: core::ptr::null_mut(),
                });
                self.count += 1;
                self.count - 1
            }
        };
        let Some(gpu) = self.gpu(gpu) else { return };
        if let Some(place) = gpu.shares.get_mut(gpu.count) {
            place.write(share);
            gpu.count += 1;
        }
    }

    /// How many GPUs the container has shares of.
    pub(crate) fn gpu_count(&self) -> usize {
        self.count
    }

    /// The GPU with that UUID.
    pub(crate) fn find(&mut self, uuid: GpuUuid) -> Option<usize> {
        let known = self.known(uuid);
        #[cfg(feature = "hami")]
        if known.is_none() && self.by_variables {
            let ordinal = self.devices.iter().position(|device| *device == Some(uuid));
            self.add(crate::variables::share_of(uuid, ordinal)?);
            return self.known(uuid);
        }
        known
    }

    fn known(&mut self, uuid: GpuUuid) -> Option<usize> {
        (0..self.count).find(|index| self.gpu(*index).is_some_and(|gpu| gpu.uuid == uuid))
    }

    /// The UUID of a device, if it is known.
    pub(crate) fn device_uuid(&self, device: i32) -> Option<GpuUuid> {
        *self.devices.get(usize::try_from(device).ok()?)?
    }

    /// Remembers the UUID of a device.
    pub(crate) fn set_device_uuid(&mut self, device: i32, uuid: GpuUuid) {
        if let Some(place) =
            usize::try_from(device).ok().and_then(|device| self.devices.get_mut(device))
        {
            *place = Some(uuid);
        }
    }

    /// The primary context of a device, to be read or changed.
    pub(crate) fn primary(&mut self, device: i32) -> Option<&mut usize> {
        self.primaries.get_mut(usize::try_from(device).ok()?)
    }

    /// What pointers, handles or arrays cost.
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

    /// What the driver counts itself.
    pub(crate) fn gauges(&mut self) -> &mut Table<Gauge> {
        &mut self.gauges
    }

    /// What keeps physical memory beside its handles and mappings.
    pub(crate) fn bindings(&mut self) -> &mut Table<Binding> {
        &mut self.bindings
    }

    /// A number that was never given out before.
    pub(crate) fn next_ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    /// Takes memory of a GPU.
    ///
    /// # Errors
    /// It is not granted.
    pub(crate) fn reserve(&mut self, gpu: usize, bytes: u64) -> Result<(), Refused> {
        let shares = self.shares(gpu);
        match reserve_across(shares, bytes) {
            Err(Refused::Limit) => {}
            Err(Refused::Tampered) => return Err(self.refuse(gpu, bytes, Refused::Tampered)),
            Ok(()) => return Ok(()),
        }
        shares.iter().for_each(Share::reclaim);
        reserve_across(shares, bytes).map_err(|refused| self.refuse(gpu, bytes, refused))
    }

    /// Counts and remembers a refusal.
    fn refuse(&mut self, gpu: usize, bytes: u64, refused: Refused) -> Refused {
        let shares = self.shares(gpu);
        let Memory { used, limit, .. } = memory_of(shares);
        if let Some(first) = shares.first().filter(|_| refused == Refused::Limit) {
            first.count_refusal(bytes, used);
        }
        let reason = match refused {
            Refused::Limit => Reason::Limit { used, limit },
            Refused::Tampered => Reason::Unusable,
        };
        if let Some(uuid) = self.gpu(gpu).map(|gpu| gpu.uuid) {
            self.refusal.put(trace::Refusal { gpu: uuid, bytes, reason });
        }
        refused
    }

    /// The container has no share of that GPU.
    pub(crate) fn refuse_without_share(&mut self, uuid: GpuUuid, bytes: u64) {
        self.refusal.put(trace::Refusal { gpu: uuid, bytes, reason: Reason::NoShare });
    }

    /// The last refusal of memory.
    pub(crate) fn last_refusal(&mut self) -> &mut LastRefusal {
        &mut self.refusal
    }

    /// Charges a context that is about to begin. The first of a process on a GPU is part of its
    /// account, as long as it lives.
    ///
    /// # Errors
    /// It is not granted.
    pub(crate) fn begin_context(&mut self, gpu: usize) -> Result<(), Refused> {
        let fee = self.shares(gpu).first_mut().map_or(0, Share::context_bytes);
        let (known, another) =
            self.gpu(gpu).map_or((0, 0), |gpu| (gpu.contexts, gpu.context_bytes));
        self.reserve(gpu, if known == 0 { 0 } else { another })?;
        if let Some(gpu) = self.gpu(gpu) {
            gpu.context_bytes = if known == 0 { fee } else { another };
            gpu.contexts = known.saturating_add(1);
        }
        Ok(())
    }

    /// A context has ended, or did not begin.
    pub(crate) fn end_context(&mut self, index: usize) {
        let Some(gpu) = self.gpu(index) else { return };
        gpu.contexts = gpu.contexts.saturating_sub(1);
        let fee = if gpu.contexts == 0 { 0 } else { gpu.context_bytes };
        self.release(index, fee);
    }

    /// Gives memory of a GPU back.
    pub(crate) fn release(&mut self, gpu: usize, bytes: u64) {
        release_across(self.shares(gpu), bytes);
    }

    /// Memory of a GPU as its grants and ledgers say; nothing where there is no grant.
    pub(crate) fn memory(&mut self, uuid: GpuUuid) -> Memory {
        let Some(gpu) = self.find(uuid) else { return Memory::NOTHING };
        let shares = self.shares(gpu);
        shares.iter_mut().for_each(Share::reclaim_for_report);
        memory_of(shares)
    }

    /// The utilization of a GPU, and the ledger that it follows from: that of the share whose name
    /// comes first, as for launches.
    pub(crate) fn usage(&mut self, uuid: GpuUuid) -> Option<(&mut Usage, &'static LedgerPage)> {
        let gpu = self.find(uuid)?;
        let shares = self.shares(gpu);
        let ledger = shares.iter().min_by_key(|share| share.name())?.ledger();
        let gpu = self.gpu(gpu)?;
        if gpu.usage.is_null() {
            let length = size_of::<Usage>().next_multiple_of(4096);
            gpu.usage = sys::map(Map::Private, length)?.cast();
        }
        // SAFETY: mapped with that length and zeroed, which is its beginning, and never unmapped.
        Some((unsafe { &mut *gpu.usage }, ledger))
    }

    /// Whether plain memory of a GPU may spill to the host. One grant that lets it is enough: what
    /// it adds to the limit may be beyond what the GPU has.
    pub(crate) fn may_spill(&mut self, gpu: usize) -> bool {
        self.shares(gpu).iter_mut().any(Share::may_spill)
    }

    /// Whether it matters, and is not known yet, whether this process shares a GPU by MPS.
    pub(crate) fn wonders_about_mps(&mut self, gpu: usize) -> bool {
        self.shares(gpu).iter().any(Share::wonders_about_mps)
    }

    /// Notes whether MPS holds this process on a GPU to the percent that its shares let it have
    /// together.
    pub(crate) fn note_mps(&mut self, gpu: usize, is_client: impl Fn(u32) -> bool) {
        let shares = self.shares(gpu);
        let percent = shares.iter().map(Share::percent_by_mps).fold(0, u32::saturating_add);
        let is_client = is_client(percent);
        shares.iter_mut().for_each(|share| share.note_mps(is_client));
    }

    /// What holds for launches on a GPU: on the ledger of the share whose name comes first, which
    /// is the same in every process. `None` where there is no share, or no place for this
    /// process in the ledger.
    pub(crate) fn terms(&mut self, gpu: usize) -> Option<Terms> {
        let shares = self.shares(gpu);
        let first = (0..shares.len()).min_by_key(|at| shares.get(*at).map(Share::name))?;
        let terms = shares.get_mut(first)?.terms()?;
        let others = shares.iter_mut().enumerate().filter(|(at, _)| *at != first);
        Some(others.fold(terms, |terms, (_, share)| {
            let (policy, cores) = share.compute();
            terms.and(policy, cores, share.is_by_mps())
        }))
    }

    /// Calls `found` with the processes of a PID namespace that have used a GPU.
    pub(crate) fn holders(&mut self, uuid: GpuUuid, namespace: u64, mut found: impl FnMut(Holder)) {
        let Some(gpu) = self.find(uuid) else { return };
        let usage = self.gpu(gpu).map_or(core::ptr::null_mut(), |gpu| gpu.usage);
        // SAFETY: NULL, or mapped by `usage` and never unmapped; under the lock, as here.
        let usage = unsafe { usage.as_ref() };
        let shares = self.shares(gpu);
        let ledger = shares.iter().min_by_key(|share| share.name()).map(Share::ledger);
        shares.iter().for_each(Share::reclaim);
        for (at, share) in shares.iter().enumerate() {
            for (pid, _) in share.holders(namespace) {
                // Who has memory of several grants is one process.
                let of_process = |share: &Share| {
                    share
                        .holders(namespace)
                        .filter(|holder| holder.0 == pid)
                        .map(|holder| holder.1)
                        .sum::<u64>()
                };
                let is_in = |share: &Share| share.holders(namespace).any(|holder| holder.0 == pid);
                if !shares.iter().take(at).any(is_in) {
                    let bytes = shares.iter().map(of_process).fold(0, u64::saturating_add);
                    let percent = usage
                        .zip(ledger)
                        .map_or(0, |(usage, ledger)| usage.of_process(ledger, namespace, pid));
                    found(Holder { pid, bytes, percent });
                }
            }
        }
    }

    /// Notes in this process's slots what the host calls it.
    pub(crate) fn tell_host_pid(&mut self, pid: u32) {
        for gpu in 0..self.count {
            self.shares(gpu).iter().for_each(|share| share.tell_host_pid(pid));
        }
    }

    /// The shares of a GPU.
    pub(crate) fn shares(&mut self, gpu: usize) -> &mut [Share] {
        let Some(gpu) = self.gpu(gpu) else { return &mut [] };
        let filled = gpu.shares.get_mut(..gpu.count).unwrap_or_default();
        // SAFETY: the first `count` were written.
        unsafe { filled.assume_init_mut() }
    }

    fn gpu(&mut self, index: usize) -> Option<&mut Gpu> {
        let place = self.gpus.get_mut(..self.count)?.get_mut(index)?;
        // SAFETY: the first `count` were written.
        Some(unsafe { place.assume_init_mut() })
    }
}
