//! Systems whose unit is a slot: one of a fixed number of equal parts of a GPU.

use tessera_api::config::MemoryPercent;

use crate::ask::{MemoryAsk, ShareAsk};

/// GPUs for a number of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Slots {
    /// A part of one GPU.
    Part(ShareAsk),
    /// Whole GPUs.
    Whole(u64),
    /// More than one GPU, and not a multiple of its slots.
    Uneven,
}

/// Returns the GPUs for `slots` of GPUs with `per_gpu` slots each: a part of one GPU, up to a whole
/// one; more in whole GPUs. Both are at least 1.
pub(super) fn gpus(slots: u64, per_gpu: u64) -> Slots {
    if slots.is_multiple_of(per_gpu) {
        return Slots::Whole(slots / per_gpu);
    }
    if slots > per_gpu {
        return Slots::Uneven;
    }
    // Rounded down, so that all slots fit together. Both are at most 2,147,483,647.
    let percent = MemoryPercent::from_hundredths((slots * 10_000 / per_gpu).max(1));
    let cores = u8::try_from(slots * 100 / per_gpu).unwrap_or(100);
    let memory = percent.map_or(MemoryAsk::All, MemoryAsk::Percent);
    Slots::Part(ShareAsk { memory, cores, ..ShareAsk::default() })
}
