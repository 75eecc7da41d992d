//! Memory that processes of a claim share with each other; one of them is charged for it.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::LedgerPage;
use tessera_intercept_abi::ledger::ExportsPage;

/// A handle under which memory is exported: `CUipcMemHandle`, `CUmemPoolPtrExportData`.
pub type ExportHandle = [u8; 64];

/// Notes that a process of the claim has exported memory under a handle. It is charged to that
/// process as long as it holds it; the CUDA driver forbids to free memory that others have open.
pub fn note_export(ledger: &LedgerPage, handle: &ExportHandle) {
    if was_exported(ledger, handle) {
        return;
    }
    let ExportsPage { count, hashes } = &ledger.exports;
    let number = count.fetch_add(1, Ordering::Relaxed) as usize;
    if let Some(oldest) = hashes.get(number % hashes.len()) {
        oldest.store(hash(handle), Ordering::Release);
    }
}

/// Returns true if a process of the claim has exported memory under this handle, unless over 255
/// others were noted since.
#[must_use]
pub fn was_exported(ledger: &LedgerPage, handle: &ExportHandle) -> bool {
    let hash = hash(handle);
    ledger.exports.hashes.iter().any(|known| known.load(Ordering::Acquire) == hash)
}

/// Returns a hash (FNV-1a) that is not 0.
fn hash(handle: &ExportHandle) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    handle.iter().fold(0xcbf2_9ce4_8422_2325, step).max(1)
}

#[cfg(test)]
mod tests {
    use std::boxed::Box;

    use tessera_intercept_abi::ledger::EXPORTS;

    use super::*;

    fn handle(number: u8, last: u8) -> ExportHandle {
        let mut handle = [number; 64];
        handle[63] = last;
        handle
    }

    #[test]
    fn handles_are_known_until_255_others_follow() {
        let ledger = Box::new(LedgerPage::empty());
        assert!(!was_exported(&ledger, &[0; 64]), "of an empty ledger");
        note_export(&ledger, &handle(1, 0));
        for last in 1..=254 {
            note_export(&ledger, &handle(1, last));
            note_export(&ledger, &handle(1, last));
        }
        assert!(was_exported(&ledger, &handle(1, 0)));
        assert!(!was_exported(&ledger, &handle(2, 0)));
        note_export(&ledger, &handle(2, 0));
        assert!(was_exported(&ledger, &handle(2, 0)) && !was_exported(&ledger, &handle(1, 0)));
        assert_eq!(EXPORTS, 255);
    }
}
