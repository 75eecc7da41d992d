//! Share of a GPU: a grant and its ledger, as this process uses them.

use core::ffi::CStr;
use core::sync::atomic::Ordering;

use tessera_intercept_abi::ledger::{SLOT_LIVE, Total};
use tessera_intercept_abi::{ComputePolicy, GpuUuid, Grant, LedgerPage};
use tessera_intercept_limiter::compute::{Contention, Entitlement, Gain, Published, is_metered};
use tessera_intercept_limiter::{Account, Overhead, ReclaimContext, Refused, adds_up, reclaim};

use crate::grants::{self, FoundGrant, NAME_ROOM};
use crate::ledger_lock::{LedgerLocks, lock_slot};
use crate::process_page::process_page;
use crate::sys;
use crate::terms::Terms;

/// Time for which memory of ended processes may be reported as used. A search for ended processes
/// takes four system calls for each living one: 45 us with 64 of them, while the driver's own call
/// takes 1.3 us.
const REPORT_AGE_NS: u64 = 100_000_000;

/// Share of a GPU.
pub(crate) struct Share {
    name: [u8; NAME_ROOM],
    /// The grant as it is mapped.
    page: *const u8,
    /// The grant as it was last read.
    grant: Grant,
    ledger: &'static LedgerPage,
    /// Device and inode of the ledger.
    identity: (u64, u64),
    /// Account of this process, once it took memory.
    account: Option<Account>,
    /// True if MPS limits this process's part of the GPU's time, once that is known.
    is_by_mps: Option<bool>,
    /// Time when this process last searched for ended processes; 0: never.
    reclaimed_ns: u64,
    /// Its place in the file of HAMi's monitor.
    #[cfg(feature = "hami")]
    shown: Option<crate::hami::Shown>,
}

impl Share {
    /// Creates the share of a grant. `None` if its name is too long.
    pub(crate) fn new(found: FoundGrant<'_>) -> Option<Self> {
        let FoundGrant { name, page, grant, ledger, identity } = found;
        let mut room = [0; NAME_ROOM];
        let bytes = name.to_bytes_with_nul();
        room.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(Self {
            name: room,
            page,
            grant,
            ledger,
            identity,
            account: None,
            is_by_mps: None,
            reclaimed_ns: 0,
            #[cfg(feature = "hami")]
            shown: None,
        })
    }

    /// Returns the GPU.
    pub(crate) fn gpu(&self) -> GpuUuid {
        self.grant.gpu_uuid
    }

    /// Returns the bytes that all processes of the share may hold together, now. While the host is
    /// writing the grant, its old values apply; a grant that has become unreadable allows nothing.
    pub(crate) fn limit(&mut self) -> u64 {
        let sequence = grants::sequence(self.page);
        if sequence != self.grant.sequence && sequence.is_multiple_of(2) {
            match grants::read_stable(self.page) {
                Some(grant) if grant.gpu_uuid == self.grant.gpu_uuid => self.grant = grant,
                _ => return 0,
            }
        }
        self.grant.memory_limit_bytes
    }

    /// Returns the memory that the CUDA driver takes by itself for the share's processes, as the
    /// host measured it.
    pub(crate) fn overhead(&self) -> Overhead {
        Overhead::read(grants::published(self.page))
    }

    /// Returns `None` if launches are metered; otherwise the utilization in percent that the host
    /// publishes, if it does.
    pub(crate) fn unmetered(&self, now: u64) -> Option<Option<u8>> {
        let page = grants::published(self.page);
        let gain = page.gain.load(Ordering::Relaxed);
        (!is_metered(page)).then(|| Gain::utilization_of(gain, now))
    }

    /// Returns true if memory may spill to the host, now.
    pub(crate) fn may_spill(&mut self) -> bool {
        self.limit();
        self.grant.oversubscribe
    }

    /// Returns the bytes that all processes of the share hold.
    pub(crate) fn used(&self) -> u64 {
        Total::unpack(self.ledger.total.load(Ordering::Relaxed)).used_bytes
    }

    /// Returns the processes of a PID namespace that have used the GPU, and their bytes: 0 of a
    /// process with only a context, if contexts are not charged.
    pub(crate) fn holders(&self, namespace: u64) -> impl Iterator<Item = (u32, u64)> {
        let live = self.ledger.slot.iter().filter(move |slot| {
            slot.state.load(Ordering::Relaxed) == SLOT_LIVE
                && slot.pid_namespace.load(Ordering::Relaxed) == namespace
        });
        live.map(|slot| (slot.pid.load(Ordering::Relaxed), slot.used_bytes.load(Ordering::Relaxed)))
    }

    /// Reclaims memory of ended processes, unless that was done a moment ago: for reports, which
    /// programs request often. Before a refusal, [`reclaim`](Self::reclaim) is called.
    pub(crate) fn reclaim_for_report(&mut self) {
        if self.used() == self.account.as_ref().map_or(0, Account::held) {
            return;
        }
        let now_ns = sys::monotonic_ns();
        if self.reclaimed_ns == 0 || now_ns.saturating_sub(self.reclaimed_ns) >= REPORT_AGE_NS {
            self.reclaimed_ns = now_ns;
            self.reclaim();
        }
    }

    /// Reclaims memory of ended processes.
    pub(crate) fn reclaim(&self) {
        let held_by_others = self.used() > self.account.as_ref().map_or(0, Account::held);
        let any_other = || {
            let live = self
                .ledger
                .slot
                .iter()
                .filter(|slot| slot.state.load(Ordering::Relaxed) == SLOT_LIVE);
            live.count() > usize::from(self.account.is_some())
        };
        if held_by_others
            && any_other()
            && let Some(locks) = self.locks()
        {
            reclaim(self.ledger, &locks, &self.reclaim_context());
        }
    }

    /// Returns the bytes charged for a context.
    pub(crate) fn context_bytes(&mut self) -> u64 {
        self.grant.context_bytes
    }

    /// Counts a refusal of `bytes` while `used` bytes were used.
    pub(crate) fn count_refusal(&self, bytes: u64, used: u64) {
        self.ledger.refused_bytes.store(bytes, Ordering::Relaxed);
        self.ledger.refused_used_bytes.store(used, Ordering::Relaxed);
        self.ledger.refused.fetch_add(1, Ordering::Release);
    }

    /// Counts a driver function that the program got and that the interceptor does not know.
    pub(crate) fn count_unknown(&self) {
        self.ledger.unknown_functions.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns its ledger.
    pub(crate) fn ledger(&self) -> &'static LedgerPage {
        self.ledger
    }

    /// Returns its name.
    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    /// Returns the current entitlement to the GPU's time.
    pub(crate) fn entitlement(&mut self) -> Entitlement {
        self.limit();
        self.known_entitlement()
    }

    fn known_entitlement(&self) -> Entitlement {
        #[cfg(feature = "hami")]
        if self.shown.is_some_and(|shown| shown.lifts_compute_limit()) {
            return Entitlement::UNLIMITED;
        }
        Entitlement::of_grant(self.grant.policy, self.grant.cores_percent)
    }

    /// Returns true if the grant is for MPS and it is not known if this process is a client.
    pub(crate) fn needs_mps_check(&self) -> bool {
        self.grant.mps && self.is_by_mps.is_none()
    }

    /// Returns the percent of the GPU that it allows a client of MPS.
    pub(crate) fn percent_by_mps(&self) -> u32 {
        match (self.grant.policy, self.grant.cores_percent) {
            (ComputePolicy::None, _) | (_, 0) => 100,
            (_, percent) => percent,
        }
    }

    /// Notes if MPS limits this process.
    pub(crate) fn note_mps(&mut self, is_client: bool) {
        self.is_by_mps = Some(is_client);
    }

    /// Returns true if MPS limits this process. A process that is no client, or has raised its own
    /// percentage, is limited as without MPS.
    pub(crate) fn is_by_mps(&self) -> bool {
        self.grant.mps && self.is_by_mps == Some(true)
    }

    /// Returns the terms of launches by this share alone.
    pub(crate) fn terms(&mut self) -> Option<Terms> {
        let entitlement = self.entitlement();
        let slot = self.account().ok()?.slot();
        let (published, by_mps) = (grants::published(self.page), self.is_by_mps());
        Some(Terms { ledger: self.ledger, slot, published, entitlement, by_mps })
    }

    /// Returns the account of this process; creates it if the ledger is consistent.
    fn account(&mut self) -> Result<&mut Account, Refused> {
        if self.account.is_none() {
            let locks = self.locks().ok_or(Refused::Tampered)?;
            reclaim(self.ledger, &locks, &self.reclaim_context());
            if !adds_up(self.ledger) {
                return Err(Refused::Tampered);
            }
            let account =
                lock_slot(self.ledger, &locks, &self.reclaim_context()).ok_or(Refused::Limit)?;
            self.account = Some(account);
            if let Some(pid) = process_page().and_then(|page| page.host_pid.known()) {
                self.set_host_pid(pid);
            }
        }
        self.account.as_mut().ok_or(Refused::Tampered)
    }

    fn take_from_ledger(&mut self, least: u64, most: u64) -> Result<u64, Refused> {
        let limit = self.limit();
        let (limit, ledger) = (self.overhead().limit_of(limit), self.ledger);
        let context_bytes = self.grant.context_bytes;
        let account = self.account()?;
        // Contexts of this process are charged before the first memory in them.
        if !account.has_charged_contexts() {
            account.charge_contexts(ledger, context_bytes, limit)?;
        }
        account.take(ledger, least, most, limit)
    }

    /// Writes the host's PID of this process into its slot.
    pub(crate) fn set_host_pid(&self, pid: u32) {
        if let Some(slot) =
            self.account.as_ref().and_then(|account| self.ledger.slot.get(account.slot()))
        {
            slot.set_host_pid(pid);
        }
    }

    /// Returns the context in which slots of ended processes are reclaimed, now.
    fn reclaim_context(&self) -> ReclaimContext {
        let now_ns = sys::monotonic_ns();
        let published = self.published(now_ns);
        ReclaimContext {
            now_ns,
            rate: self.known_entitlement().rate(published),
            contention: published.map_or(Contention::NONE, |published| published.others),
        }
    }

    /// Returns the values that the host publishes.
    fn published(&self, now_ns: u64) -> Option<Published> {
        Published::read(grants::published(self.page), now_ns)
    }

    fn locks(&self) -> Option<LedgerLocks> {
        let name = CStr::from_bytes_until_nul(&self.name).ok()?;
        let ledger = grants::reopen_ledger(name, self.identity)?;
        Some(LedgerLocks {
            ledger,
            #[cfg(feature = "hami")]
            shown: self.shown,
        })
    }
}

/// HAMi's monitor.
#[cfg(feature = "hami")]
impl Share {
    /// Returns the share as the monitor sees it there.
    pub(crate) fn shown_in(self, shown: Option<crate::hami::Shown>) -> Self {
        Self { shown, ..self }
    }

    /// Shows the memory of this process.
    fn show_memory(&self) {
        if let (Some(shown), Some(account)) = (&self.shown, &self.account) {
            shown.show_memory(account.slot(), account.held());
        }
    }

    /// Returns where to show the utilization by this process, its slot, and its GPU-ns so far.
    pub(crate) fn shown_usage(&self) -> Option<(crate::hami::Shown, usize, u64)> {
        let (shown, slot) = (self.shown?, self.account.as_ref()?.slot());
        let gpu_ns = self.ledger.slot.get(slot)?.compute.gpu_ns.load(Ordering::Relaxed);
        Some((shown, slot, gpu_ns))
    }

    /// Shows nothing of this process from now on: it ends.
    pub(crate) fn hide(&mut self) {
        if let (Some(shown), Some(account)) = (self.shown.take(), &self.account) {
            shown.clear(account.slot());
        }
    }
}

impl tessera_intercept_limiter::Share for Share {
    fn take(&mut self, least: u64, most: u64) -> Result<u64, Refused> {
        let taken = self.take_from_ledger(least, most);
        #[cfg(feature = "hami")]
        self.show_memory();
        taken
    }

    fn give(&mut self, bytes: u64) -> u64 {
        let ledger = self.ledger;
        let given = self.account.as_mut().map_or(0, |account| account.give(ledger, bytes));
        #[cfg(feature = "hami")]
        self.show_memory();
        given
    }
}
