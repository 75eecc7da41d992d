//! Memory of graphs, as it is charged.
//!
//! A node that allocates memory reserves addresses. The memory comes with the upload or the launch
//! of the executable graph, from the memory that the driver keeps for the graphs of a GPU until it
//! is trimmed. The driver counts it (see [`crate::driver_counted`]).

use core::sync::atomic::{AtomicBool, Ordering};

use crate::charge::{Charge, Refusal};
use crate::driver::cuda::{self, Device};
use crate::driver_counted;
use crate::state::{GRAPH, Kind, State, kind, with_state};

/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: core::ffi::c_int = 2;

/// True if this process has an executable graph that allocates memory. Launches of other graphs
/// cost nothing here.
static ANY: AtomicBool = AtomicBool::new(false);

/// Returns true if this process has had an executable graph that allocates memory.
pub(crate) fn is_used() -> bool {
    ANY.load(Ordering::Relaxed)
}

/// Notes that this process has an executable graph that allocates memory.
pub(crate) fn note_use() {
    ANY.store(true, Ordering::Relaxed);
}

/// Returns the key of the counter of a GPU's graphs.
pub(crate) fn counter_of(gpu: u32) -> u64 {
    GRAPH | u64::from(gpu)
}

/// Changes the charge for the graphs of a GPU to the bytes that the driver keeps for them.
pub(crate) fn settle(gpu: u32, device: Device, before: Option<Charge>) -> Result<(), Refusal> {
    driver_counted::settle(counter_of(gpu), before, || cuda::graph_memory(device, RESERVED))
}

/// Notes that no executable graph has its memory any more.
pub(crate) fn note_trimmed(state: &mut State) {
    let mut place = 0;
    while let Some((key, next)) = state.table(Kind::Graph).key_from(place) {
        place = next;
        if let Some(part) = state.table(Kind::Graph).get(key) {
            part.holders = 0;
        }
    }
}

/// Settles the graphs of all GPUs.
pub(crate) fn refresh() {
    if is_used() {
        each(|gpu, device| {
            let _ = settle(gpu, device, None);
        });
    }
}

/// Releases the memory that no graph uses. Returns true if there are graphs that allocate memory.
pub(crate) fn trim() -> bool {
    if !is_used() {
        return false;
    }
    each(|gpu, device| {
        cuda::trim_graph_memory(device);
        with_state(note_trimmed);
        let _ = settle(gpu, device, None);
    });
    true
}

fn each(mut run: impl FnMut(u32, Device)) {
    let mut place = 0;
    while let Some(Some((key, next))) = with_state(|state| state.counters().key_from(place)) {
        place = next;
        let counter = with_state(|state| state.counters().get(key).copied()).flatten();
        if let Some(counter) = counter.filter(|_| kind(key) == GRAPH) {
            run(counter.gpu, counter.handle as Device - 1);
        }
    }
}
