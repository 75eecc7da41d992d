//! One share of a GPU: a grant and its ledger, as this process uses them.

use core::ffi::CStr;
use core::sync::atomic::Ordering;

use tessera_intercept_abi::ledger::{SLOT_LIVE, Total};
use tessera_intercept_abi::{ComputePolicy, GpuUuid, Grant, LedgerPage};
use tessera_intercept_limiter::compute::{Crowd, Published, Rate, rate_of};
use tessera_intercept_limiter::{Account, Burial, Overhead, Refused, adds_up, reclaim};

use crate::compute::Terms;
use crate::grants::{self, NAME_ROOM};
use crate::host_pid::HostPid;
use crate::ledger_lock::{LedgerLocks, own_slot};
use crate::root;
use crate::sys;

/// How long what dead processes held may be reported as used. Looking for the dead costs four
/// system calls for each live process: 45 us with 64 of them, where the driver's own call takes
/// 1.3.
const REPORT_AGE_NS: u64 = 100_000_000;

/// A share.
pub(crate) struct Share {
    name: [u8; NAME_ROOM],
    /// The grant as it is mapped.
    page: *const u8,
    /// The grant as it was last read.
    grant: Grant,
    ledger: &'static LedgerPage,
    /// Device and inode of the ledger.
    identity: (u64, u64),
    /// This process's part, once it took something.
    account: Option<Account>,
    /// Whether MPS holds this process's part of the GPU's time, once that is known.
    held_by_mps: Option<bool>,
    /// When this process last looked for dead processes; 0 = never.
    reclaimed_ns: u64,
}

impl Share {
    /// A share that was found.
    pub(crate) fn new(
        name: &CStr,
        page: *const u8,
        grant: Grant,
        ledger: &'static LedgerPage,
        identity: (u64, u64),
    ) -> Option<Self> {
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
            held_by_mps: None,
            reclaimed_ns: 0,
        })
    }

    /// The GPU.
    pub(crate) fn gpu(&self) -> GpuUuid {
        self.grant.gpu_uuid
    }

    /// Bytes that all processes of the share may hold together, now. While the host is changing the
    /// grant, what it said before counts; a grant that has become unreadable allows nothing.
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

    /// Memory that the CUDA driver takes by itself for the share's processes, as the host measured
    /// it.
    pub(crate) fn overhead(&self) -> Overhead {
        Overhead::read(grants::published(self.page))
    }

    /// Whether plain memory may spill to the host, now.
    pub(crate) fn may_spill(&mut self) -> bool {
        self.limit();
        self.grant.oversubscribe
    }

    /// Bytes that all processes of the share hold.
    pub(crate) fn used(&self) -> u64 {
        Total::unpack(self.ledger.total.load(Ordering::Relaxed)).used_bytes
    }

    /// The processes of a PID namespace that have used the GPU, and how many bytes they hold:
    /// nothing where only a context is there, and contexts are not charged.
    pub(crate) fn holders(&self, namespace: u64) -> impl Iterator<Item = (u32, u64)> {
        let live = self.ledger.slot.iter().filter(move |slot| {
            slot.state.load(Ordering::Relaxed) == SLOT_LIVE
                && slot.pid_namespace.load(Ordering::Relaxed) == namespace
        });
        live.map(|slot| (slot.pid.load(Ordering::Relaxed), slot.used_bytes.load(Ordering::Relaxed)))
    }

    /// Gives back what dead processes held, unless that was done a moment ago: for a report, which
    /// programs ask for often. Before a refusal, [`reclaim`](Self::reclaim) is called.
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

    /// Gives back what dead processes held.
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
            reclaim(self.ledger, &locks, &self.burial());
        }
    }

    /// What the driver takes for a context.
    pub(crate) fn context_bytes(&mut self) -> u64 {
        self.grant.context_bytes
    }

    /// Counts a refusal of so many bytes, when so many were used.
    pub(crate) fn count_refusal(&self, bytes: u64, used: u64) {
        self.ledger.refused_bytes.store(bytes, Ordering::Relaxed);
        self.ledger.refused_used_bytes.store(used, Ordering::Relaxed);
        self.ledger.refused.fetch_add(1, Ordering::Release);
    }

    /// Counts a function that was handed out and that nobody here knows.
    pub(crate) fn count_unknown(&self) {
        self.ledger.unknown_functions.fetch_add(1, Ordering::Relaxed);
    }

    /// Its ledger.
    pub(crate) fn ledger(&self) -> &'static LedgerPage {
        self.ledger
    }

    /// Its name.
    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    /// How its part of the GPU's time is held, and how much that is, now.
    pub(crate) fn compute(&mut self) -> (ComputePolicy, Rate) {
        self.limit();
        (self.policy(), self.cores())
    }

    /// How its part is held. Without cores nothing is guaranteed: what others leave is known as
    /// long as the host says it.
    fn policy(&self) -> ComputePolicy {
        match (self.grant.policy, self.grant.cores_percent) {
            (ComputePolicy::Balance, 0) if self.published(sys::monotonic_ns()).is_none() => {
                ComputePolicy::None
            }
            (ComputePolicy::Fixed, 0) => ComputePolicy::None,
            (policy, _) => policy,
        }
    }

    /// Whether it matters, and is not known yet, whether this process shares the GPU by MPS.
    pub(crate) fn wonders_about_mps(&self) -> bool {
        self.grant.mps && self.held_by_mps.is_none()
    }

    /// The percent of the GPU that it lets a client of MPS have.
    pub(crate) fn percent_by_mps(&self) -> u32 {
        match (self.grant.policy, self.grant.cores_percent) {
            (ComputePolicy::None, _) | (_, 0) => 100,
            (_, percent) => percent,
        }
    }

    /// Notes whether MPS holds this process.
    pub(crate) fn note_mps(&mut self, is_client: bool) {
        self.held_by_mps = Some(is_client);
    }

    /// Whether MPS holds this process. One that is no client, or gave itself more, is held as if
    /// there were no MPS.
    pub(crate) fn is_by_mps(&self) -> bool {
        self.grant.mps && self.held_by_mps == Some(true)
    }

    /// What holds for launches by it alone.
    pub(crate) fn terms(&mut self) -> Option<Terms> {
        let (policy, share) = self.compute();
        let slot = self.account().ok()?.slot();
        let (published, by_mps) = (grants::published(self.page), self.is_by_mps());
        Some(Terms { ledger: self.ledger, slot, published, policy, share, by_mps })
    }

    /// This process's part; begins it, if the ledger is in order.
    fn account(&mut self) -> Result<&mut Account, Refused> {
        if self.account.is_none() {
            let locks = self.locks().ok_or(Refused::Tampered)?;
            reclaim(self.ledger, &locks, &self.burial());
            if !adds_up(self.ledger) {
                return Err(Refused::Tampered);
            }
            let account = own_slot(self.ledger, &locks, &self.burial()).ok_or(Refused::Limit)?;
            self.account = Some(account);
            if let Some(pid) = root::host_pid().and_then(HostPid::known) {
                self.tell_host_pid(pid);
            }
        }
        self.account.as_mut().ok_or(Refused::Tampered)
    }

    /// Notes what the host calls this process, where it has a slot.
    pub(crate) fn tell_host_pid(&self, pid: u32) {
        if let Some(slot) =
            self.account.as_ref().and_then(|account| self.ledger.slot.get(account.slot()))
        {
            slot.tell_host_pid(pid);
        }
    }

    /// How the dead are settled for, now.
    fn burial(&self) -> Burial {
        let now_ns = sys::monotonic_ns();
        let published = self.published(now_ns);
        Burial {
            now_ns,
            rate: rate_of(self.policy(), self.cores(), published),
            crowd: published.map_or(Crowd::NOBODY, |published| published.others),
        }
    }

    /// The grant's part of the GPU's time; all of it where there is no cap.
    fn cores(&self) -> Rate {
        match (self.policy(), self.grant.cores_percent) {
            (ComputePolicy::Balance, 0) => Rate::LEAST,
            (_, 0) => Rate::FULL,
            (_, percent) => Rate::from_percent(percent),
        }
    }

    /// What the host says of the GPU's other users.
    fn published(&self, now_ns: u64) -> Option<Published> {
        Published::read(grants::published(self.page), now_ns)
    }

    fn locks(&self) -> Option<LedgerLocks> {
        let name = CStr::from_bytes_until_nul(&self.name).ok()?;
        grants::reopen_ledger(name, self.identity).map(LedgerLocks)
    }
}

impl tessera_intercept_limiter::Share for Share {
    fn take(&mut self, least: u64, most: u64) -> Result<u64, Refused> {
        let limit = self.limit();
        let (limit, ledger) = (self.overhead().limit_of(limit), self.ledger);
        let context_bytes = self.grant.context_bytes;
        let account = self.account()?;
        // The contexts of this process, before the first memory in them.
        if !account.has_paid_for_contexts() {
            account.pay_for_contexts(ledger, context_bytes, limit)?;
        }
        account.take(ledger, least, most, limit)
    }

    fn give(&mut self, bytes: u64) -> u64 {
        let ledger = self.ledger;
        self.account.as_mut().map_or(0, |account| account.give(ledger, bytes))
    }
}
