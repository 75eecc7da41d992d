//! GPU of a container, and the container's shares of it.

use core::mem::{MaybeUninit, size_of};
use core::ptr;

use tessera_intercept_abi::{GpuUuid, LedgerPage};
use tessera_intercept_limiter::{Refused, release_across, reserve_across};

use super::usage::Usage;
use crate::share::Share;
use crate::sys::{self, Map};
use crate::terms::Terms;

/// Shares of one GPU that a container can have.
const SHARES: usize = 16;

/// A GPU.
pub(crate) struct Gpu {
    pub(super) uuid: GpuUuid,
    shares: [MaybeUninit<Share>; SHARES],
    count: usize,
    /// Contexts of this process on it.
    contexts: u32,
    /// Bytes charged for each context but the first; known with the first.
    context_bytes: u64,
    /// Its utilization, once requested.
    usage: *mut Usage,
}

/// Memory of a GPU as the container is to see it.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    /// Limit by its grants.
    pub(crate) limit: u64,
    /// Bytes that its processes hold, with the memory that the CUDA driver takes by itself.
    pub(crate) used: u64,
    /// True if memory spills to the host: then there may be more than the GPU has.
    pub(crate) spills: bool,
}

/// A process that has used a GPU.
#[derive(Clone, Copy)]
pub(crate) struct Holder {
    pub(crate) pid: u32,
    /// Bytes of GPU memory.
    pub(crate) bytes: u64,
    /// Percent of the GPU's time, as last measured.
    pub(crate) percent: u8,
}

/// Utilization of a GPU by the container.
#[derive(Clone, Copy)]
pub(crate) enum Utilization {
    /// Percent of the GPU's time.
    Percent(u8),
    /// Not known yet: read again after [`LEAST_NS`](super::LEAST_NS).
    NotYet,
    /// Not known to the host, and not computed because launches are not metered: that of the GPU.
    OfDevice,
}

impl Memory {
    /// Memory of a GPU without a grant.
    pub(crate) const NONE: Self = Self { limit: 0, used: 0, spills: false };

    /// Returns the total bytes of a GPU that has `physical` bytes.
    pub(crate) fn total_of(self, physical: u64) -> u64 {
        if self.spills { self.limit } else { self.limit.min(physical) }
    }

    /// Returns the free bytes of a GPU that has `physical` bytes free.
    pub(crate) fn free_of(self, physical: u64) -> u64 {
        let granted = self.limit.saturating_sub(self.used);
        if self.spills { granted } else { granted.min(physical) }
    }
}

impl Gpu {
    pub(super) const fn new(uuid: GpuUuid) -> Self {
        Self {
            uuid,
            shares: [const { MaybeUninit::uninit() }; SHARES],
            count: 0,
            contexts: 0,
            context_bytes: 0,
            usage: ptr::null_mut(),
        }
    }

    /// Adds a share. A share that there is no room for is ignored.
    pub(super) fn add(&mut self, share: Share) {
        if let Some(place) = self.shares.get_mut(self.count) {
            place.write(share);
            self.count += 1;
        }
    }

    /// Returns its shares.
    pub(crate) fn shares(&mut self) -> &mut [Share] {
        let filled = self.shares.get_mut(..self.count).unwrap_or_default();
        // SAFETY: the first `count` were written.
        unsafe { filled.assume_init_mut() }
    }

    /// Returns the index of the share whose name is first. Launches are accounted in its ledger,
    /// which is the same in every process.
    fn first(&mut self) -> Option<usize> {
        let shares = self.shares();
        (0..shares.len()).min_by_key(|at| shares.get(*at).map(Share::name))
    }

    fn first_ledger(&mut self) -> Option<&'static LedgerPage> {
        let first = self.first()?;
        self.shares().get(first).map(Share::ledger)
    }

    /// Takes memory.
    ///
    /// # Errors
    /// The memory is not granted.
    pub(super) fn reserve(&mut self, bytes: u64) -> Result<(), Refused> {
        let shares = self.shares();
        match reserve_across(shares, bytes) {
            Err(Refused::Limit) => {}
            done => return done,
        }
        shares.iter().for_each(Share::reclaim);
        reserve_across(shares, bytes)
    }

    /// Releases memory.
    pub(super) fn release(&mut self, bytes: u64) {
        release_across(self.shares(), bytes);
    }

    /// Returns its memory as its shares say.
    pub(super) fn memory(&mut self) -> Memory {
        self.shares().iter_mut().fold(Memory::NONE, |sum, share| Memory {
            limit: sum.limit.saturating_add(share.limit()),
            used: sum.used.saturating_add(share.overhead().used_of(share.used())),
            spills: sum.spills || share.may_spill(),
        })
    }

    /// Returns the bytes to charge for a new context: those of the first are part of the account.
    pub(super) fn next_context_bytes(&self) -> u64 {
        if self.contexts == 0 { 0 } else { self.context_bytes }
    }

    /// Counts a new context.
    pub(super) fn begin_context(&mut self) {
        if self.contexts == 0 {
            self.context_bytes = self.shares().first_mut().map_or(0, Share::context_bytes);
        }
        self.contexts = self.contexts.saturating_add(1);
    }

    /// Counts a context that has ended, and releases its memory.
    pub(super) fn end_context(&mut self) {
        self.contexts = self.contexts.saturating_sub(1);
        let bytes = self.next_context_bytes();
        self.release(bytes);
    }

    /// Updates its utilization. `None` without a share.
    pub(super) fn update_usage(&mut self, now: u64) -> Option<Utilization> {
        let first = self.first()?;
        let unmetered = self.shares().get(first)?.unmetered(now);
        let (usage, ledger) = self.usage()?;
        Some(match unmetered {
            Some(None) => Utilization::OfDevice,
            Some(Some(percent)) => Utilization::Percent(usage.set_published(ledger, percent)),
            None => usage.update(ledger, now).map_or(Utilization::NotYet, Utilization::Percent),
        })
    }

    fn usage(&mut self) -> Option<(&mut Usage, &'static LedgerPage)> {
        let ledger = self.first_ledger()?;
        if self.usage.is_null() {
            let length = size_of::<Usage>().next_multiple_of(4096);
            self.usage = sys::map(Map::Private, length)?.cast();
        }
        // SAFETY: mapped with that length and zeroed, which is a new one, and never unmapped.
        Some((unsafe { &mut *self.usage }, ledger))
    }

    /// Returns the terms of launches. `None` without a share, or without a slot in the ledger.
    pub(super) fn terms(&mut self) -> Option<Terms> {
        let first = self.first()?;
        let terms = self.shares().get_mut(first)?.terms()?;
        let others = self.shares().iter_mut().enumerate().filter(|(at, _)| *at != first);
        Some(others.fold(terms, |terms, (_, share)| {
            let entitlement = share.entitlement();
            terms.and(entitlement, share.is_by_mps())
        }))
    }

    /// Calls `found` with the processes of a PID namespace that have used it. A process with memory
    /// of several grants is one process.
    pub(super) fn each_holder(&mut self, namespace: u64, mut found: impl FnMut(Holder)) {
        // SAFETY: NULL, or mapped by `usage` and never unmapped; under the lock, as here.
        let usage = unsafe { self.usage.as_ref() };
        let ledger = self.first_ledger();
        let shares = self.shares();
        shares.iter().for_each(Share::reclaim);
        for (at, share) in shares.iter().enumerate() {
            for (pid, _) in share.holders(namespace) {
                let bytes_of = |share: &Share| {
                    let own = share.holders(namespace).filter(|holder| holder.0 == pid);
                    own.map(|holder| holder.1).sum::<u64>()
                };
                let is_in = |share: &Share| share.holders(namespace).any(|holder| holder.0 == pid);
                if !shares.iter().take(at).any(is_in) {
                    let bytes = shares.iter().map(bytes_of).fold(0, u64::saturating_add);
                    let percent = usage
                        .zip(ledger)
                        .map_or(0, |(usage, ledger)| usage.of_process(ledger, namespace, pid));
                    found(Holder { pid, bytes, percent });
                }
            }
        }
    }
}
