//! Locks that own slots.
//!
//! A lock on a byte of the ledger belongs to an open file description. The owner maps the file
//! without access, not inherited by forked children, and closes the descriptor. So the lock lives
//! exactly as long as the owner's address space, whatever the program does with descriptors, and
//! however it ends.

use tessera_intercept_abi::LedgerPage;
use tessera_intercept_abi::ledger::LOCK_OFFSET;
use tessera_intercept_limiter::{Account, Identity, ReclaimContext, SlotLocks, attach};

use crate::sys::{self, Fd, HERE, Map};

/// The ledger, opened for locking.
pub(crate) struct LedgerLocks {
    pub(crate) ledger: Fd,
    /// Places of its slots in the file of HAMi's monitor.
    #[cfg(feature = "hami")]
    pub(crate) shown: Option<crate::hami::Shown>,
}

impl SlotLocks for LedgerLocks {
    fn try_lock(&self, slot: usize) -> bool {
        self.ledger.try_lock(LOCK_OFFSET + slot as u64)
    }

    fn unlock(&self, slot: usize) {
        // Before the lock is released, because the next process of the slot writes there too.
        #[cfg(feature = "hami")]
        if let Some(shown) = &self.shown {
            shown.clear(slot);
        }
        self.ledger.unlock(LOCK_OFFSET + slot as u64);
    }
}

/// Assigns a slot to this process for as long as its address space lives.
pub(crate) fn lock_slot(
    ledger: &LedgerPage,
    locks: &LedgerLocks,
    reclaim_context: &ReclaimContext,
) -> Option<Account> {
    /// Any length: the mapping keeps the file open.
    const PAGE: usize = 4096;
    let slot = attach(ledger, locks, this_process(), reclaim_context)?;
    // The mapping is never unmapped. If it fails, the lock ends with the descriptor, and the slot
    // with the lock.
    sys::map(Map::NoAccess(&locks.ledger), PAGE)?;
    Some(Account::new(slot))
}

fn this_process() -> Identity {
    let pid_namespace = sys::pid_namespace();
    Identity { pid: sys::pid(), start_ticks: start_ticks().unwrap_or(0), pid_namespace }
}

/// Field 22 of `/proc/self/stat`. The second field is the program's name in brackets, which may
/// hold anything.
fn start_ticks() -> Option<u64> {
    let mut text = [0_u8; 1024];
    let file = Fd::open_at(HERE, c"/proc/self/stat", libc::O_RDONLY)?;
    let read = file.read_start(&mut text);
    let text = text.get(..read)?;
    let after_name = text.get(text.iter().rposition(|byte| *byte == b')')? + 2..)?;
    let field = after_name.split(|byte| *byte == b' ').nth(19)?;
    core::str::from_utf8(field).ok()?.parse().ok()
}
