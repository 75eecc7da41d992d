//! Partitions: devices that consume counters, such as the MIG devices of one GPU.
//!
//! A partition makes others impossible that consume the same counters. Policies that pack rank
//! partitions by the memory of those: the least loss keeps large partitions possible, and puts
//! small ones where large ones are impossible already.

use tessera_api::names::capacity::MEMORY;

use crate::cluster::{CounterAmount, ReachableDevices};

/// Returns the memory, in MiB, of the free partitions that allocating a candidate makes impossible,
/// its own included; `None` if it is no partition.
pub(super) fn loss(reachable: &ReachableDevices, candidate: usize) -> Option<i64> {
    let consumes = reachable.consumes.get(candidate).filter(|consumes| !consumes.is_empty())?;
    let mut left_then = reachable.counters_left.clone();
    for used in consumes {
        left_then[used.counter as usize] -= used.amount;
    }
    let is_lost = |other: usize| {
        let of_other = &reachable.consumes[other];
        reachable.exclusive[other] == 0
            && !of_other.is_empty()
            && CounterAmount::all_left(of_other, &reachable.counters_left)
            && (other == candidate || !CounterAmount::all_left(of_other, &left_then))
    };
    let count = reachable.candidates.len();
    Some((0..count).filter(|other| is_lost(*other)).map(|other| memory_mib(reachable, other)).sum())
}

fn memory_mib(reachable: &ReachableDevices, candidate: usize) -> i64 {
    let memory = reachable.candidates[candidate].device().capacity.get(MEMORY);
    let bytes = memory.map_or(0, |memory| memory.value.value_i64().unwrap_or(i64::MAX));
    // A partition without memory is lost as well.
    (bytes >> 20).max(1)
}
