//! Memory that processes share by handles.
//!
//! It belongs to the process that has allocated it. If that process frees it or ends, the memory
//! lives on while another process has it open, and belongs to the first of these: NVIDIA's open
//! kernel modules choose the next holder (`memDestructCommon`), and count it for that process.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Usage;
use super::region::{OpenedMemory, Slot};

/// Identity of exported memory: what a handle for other processes contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportedMemory {
    /// Slot of its process.
    pub slot: u64,
    /// Number of the slot's owners, that process included.
    pub owner: u64,
    /// Its address in that process; not 0.
    pub address: u64,
}

impl Usage {
    /// Exports memory of this process. `None` if the process has exported too many.
    pub fn export(&self, address: u64) -> Option<ExportedMemory> {
        let slot = self.own_slot()?;
        let is_known = slot.exported.iter().any(|word| get(word) == address);
        let put = |word: &AtomicU64| {
            word.compare_exchange(0, address, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        if !is_known && !slot.exported.iter().any(put) {
            return None;
        }
        let index = self.slot.load(Ordering::Acquire).checked_sub(1)?;
        Some(ExportedMemory { slot: index, owner: get(&slot.owners), address })
    }

    /// Notes that this process has freed memory, which it may have exported.
    pub fn freed(&self, address: u64) {
        let Some(slot) = self.current_slot() else { return };
        for word in &slot.exported {
            // Fails if it is of other memory.
            let _ = word.compare_exchange(address, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// Notes that this process has opened memory. Returns false if it has opened too many.
    pub fn opened(&self, memory: ExportedMemory, gpu: usize, bytes: u64) -> bool {
        let Some(slot) = self.own_slot() else { return false };
        // Threads of a process open memory under the lock of the fake CUDA.
        let Some(free) = slot.opened.iter().find(|opened| get(&opened.slot) == 0) else {
            return false;
        };
        free.owner.store(memory.owner, Ordering::SeqCst);
        free.address.store(memory.address, Ordering::SeqCst);
        free.gpu.store(gpu as u64, Ordering::SeqCst);
        free.bytes.store(bytes, Ordering::SeqCst);
        free.slot.store(memory.slot + 1, Ordering::SeqCst);
        true
    }

    /// Notes that this process has closed memory.
    pub fn closed(&self, memory: ExportedMemory) {
        let Some(slot) = self.current_slot() else { return };
        if let Some(opened) = slot.opened.iter().find(|opened| opened.memory() == Some(memory)) {
            opened.slot.store(0, Ordering::SeqCst);
        }
    }

    /// Returns the bytes of a GPU that belong to the process of a slot because their owner has
    /// freed them or has ended.
    pub(super) fn inherited(&self, index: usize, gpu: usize) -> u64 {
        let slots = self.region.used_slots();
        let Some(slot) = slots.get(index) else { return 0 };
        let of_gpu = slot.opened.iter().filter(|opened| get(&opened.gpu) == gpu as u64);
        let left = of_gpu.filter(|opened| {
            let Some(memory) = opened.memory() else { return false };
            let is_before =
                |(at, other): (usize, &Slot)| other.has_opened(memory) && self.region.is_alive(at);
            !self.is_owned(memory) && !slots.iter().enumerate().take(index).any(is_before)
        });
        let bytes = left.map(|opened| get(&opened.bytes)).fold(0, u64::saturating_add);
        if bytes > 0 && self.region.is_alive(index) { bytes } else { 0 }
    }

    fn is_owned(&self, memory: ExportedMemory) -> bool {
        let index = memory.slot as usize;
        let Some(slot) = self.region.used_slots().get(index) else { return false };
        get(&slot.owners) == memory.owner
            && slot.exported.iter().any(|word| get(word) == memory.address)
            && self.region.is_alive(index)
    }
}

impl Slot {
    pub(super) fn forget_shared_memory(&self) {
        for word in self.exported.iter().chain(self.opened.iter().map(|opened| &opened.slot)) {
            word.store(0, Ordering::SeqCst);
        }
    }

    fn has_opened(&self, memory: ExportedMemory) -> bool {
        self.opened.iter().any(|opened| opened.memory() == Some(memory))
    }
}

impl OpenedMemory {
    fn memory(&self) -> Option<ExportedMemory> {
        let slot = get(&self.slot).checked_sub(1)?;
        Some(ExportedMemory { slot, owner: get(&self.owner), address: get(&self.address) })
    }
}

fn get(word: &AtomicU64) -> u64 {
    word.load(Ordering::SeqCst)
}
