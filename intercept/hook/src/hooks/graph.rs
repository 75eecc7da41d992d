//! Graphs that allocate memory.
//!
//! The memory that a graph needs is computed when it is instantiated, from its nodes, however they
//! were added. See [`crate::graph_memory`] for the charge.

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use super::route::hooks;
use crate::allocation::charge_gpu;
use crate::charge::{Charge, Refusal, charge_gpu_once, gpu_of};
use crate::compute;
use crate::driver::cuda::{self, Device, Handle, OUT_OF_MEMORY, SUCCESS};
use crate::driver_counted;
use crate::graph_memory::{counter_of, is_used, note_trimmed, note_use, settle};
use crate::state::{Kind, State, with_state};
use crate::sys::{self, Map};
use crate::table::Cost;

/// The driver allocates memory of graphs in multiples of this at least.
const GRANULARITY: u64 = 2 << 20;

/// The most GPUs of the nodes of one graph.
const MOST: usize = 8;

/// `CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT`.
const USED: c_int = 0;

/// Memory that a graph needs of one GPU.
#[derive(Clone, Copy, Default)]
struct Part {
    gpu: u32,
    device: Device,
    bytes: u64,
}

/// Memory that a graph needs.
#[derive(Clone, Copy, Default)]
struct Parts {
    list: [Part; MOST],
    count: usize,
}

impl Parts {
    fn add(&mut self, part: Part) -> Option<()> {
        let known = self.list.iter_mut().take(self.count).find(|known| known.gpu == part.gpu);
        match known {
            Some(known) => known.bytes = known.bytes.saturating_add(part.bytes),
            None => {
                *self.list.get_mut(self.count)? = part;
                self.count += 1;
            }
        }
        Some(())
    }

    fn iter(&self) -> impl Iterator<Item = &Part> {
        self.list.iter().take(self.count)
    }
}

/// Nodes of a graph, in memory from the kernel.
struct Nodes {
    at: *mut Handle,
    count: usize,
}

impl Nodes {
    fn of(graph: Handle) -> Option<Self> {
        let mut count = 0;
        // SAFETY: NULL requests the number only.
        if !unsafe { cuda::graph_nodes(graph, core::ptr::null_mut(), &mut count) } {
            return None;
        }
        let at = sys::map(Map::Private, Self::length(count))?.cast();
        let nodes = Self { at, count };
        // SAFETY: there is room for this many.
        let is_read = unsafe { cuda::graph_nodes(graph, at, &mut count) };
        (is_read && count <= nodes.count).then_some(nodes)
    }

    fn length(count: usize) -> usize {
        (count * size_of::<Handle>()).next_multiple_of(4096).max(4096)
    }

    fn iter(&self) -> impl Iterator<Item = Handle> {
        // SAFETY: mapped with room for this many, and read before it is unmapped.
        (0..self.count).map(|index| unsafe { self.at.add(index).read() })
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        // SAFETY: mapped with that length; no other reference exists.
        unsafe { sys::unmap(self.at.cast(), Self::length(self.count)) };
    }
}

/// Adds the memory of the nodes of a graph and of its child graphs. `None` if the driver does not
/// report it.
fn add_up(graph: Handle, parts: &mut Parts, depth: usize) -> Option<()> {
    /// `CU_GRAPH_NODE_TYPE_GRAPH` and `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
    const CHILD: c_uint = 4;
    const ALLOC: c_uint = 10;
    /// The deepest nesting of child graphs.
    const DEEPEST: usize = 64;
    if depth > DEEPEST {
        return None;
    }
    for node in Nodes::of(graph)?.iter() {
        let kind = cuda::node_type(node)?;
        if kind == ALLOC {
            add_node(node, parts)?;
        } else if kind == CHILD {
            add_up(cuda::child_graph(node)?, parts, depth + 1)?;
        }
    }
    Some(())
}

fn add_node(node: Handle, parts: &mut Parts) -> Option<()> {
    /// Offsets of the location and of the size in `CUDA_MEM_ALLOC_NODE_PARAMS`, in words of 64
    /// bits.
    const LOCATION: usize = 1;
    const BYTES: usize = 13;
    /// `CU_MEM_LOCATION_TYPE_DEVICE`
    const ON_DEVICE: u64 = 1;
    let parameters = cuda::allocation_node(node)?;
    let [location, bytes] = [LOCATION, BYTES].map(|at| parameters.get(at).copied().unwrap_or(0));
    if location & u64::from(u32::MAX) != ON_DEVICE {
        return Some(());
    }
    let device = (location >> 32) as Device;
    parts.add(Part { gpu: gpu_of(device)?, device, bytes })
}

/// Returns the key of an executable graph's memory of its first GPU, its second and so on. Handles
/// do not have these bits.
fn key(graph: Handle, part: usize) -> u64 {
    graph as u64 | (part as u64) << 56
}

/// Stores the memory that an executable graph needs; `context` is the device + 1.
fn store(state: &mut State, graph: Handle, parts: &Parts) -> bool {
    forget(state, graph);
    for (at, part) in parts.iter().enumerate() {
        let table = state.table(Kind::Graph);
        if !table.make_room() {
            forget(state, graph);
            return false;
        }
        let device = usize::try_from(part.device).unwrap_or(0) + 1;
        table.put(
            key(graph, at),
            Cost { bytes: part.bytes, context: device, gpu: part.gpu, holders: 0 },
        );
        driver_counted::begin(state, counter_of(part.gpu), part.gpu, device);
    }
    true
}

fn forget(state: &mut State, graph: Handle) -> Parts {
    let mut parts = Parts::default();
    for at in 0..MOST {
        let Some(part) = state.table(Kind::Graph).remove(key(graph, at)) else { break };
        parts.add(part_of(part));
    }
    parts
}

fn part_of(known: Cost) -> Part {
    Part { gpu: known.gpu, device: known.context as Device - 1, bytes: known.bytes }
}

/// Returns the memory that an executable graph needs, and true if it has kept all of it since its
/// last launch.
fn known(state: &mut State, graph: Handle) -> (Parts, bool) {
    let (mut parts, mut has_all) = (Parts::default(), true);
    for at in 0..MOST {
        let Some(part) = state.table(Kind::Graph).get(key(graph, at)).copied() else { break };
        parts.add(part_of(part));
        has_all &= part.holders > 0;
    }
    (parts, has_all)
}

/// Notes that an executable graph has its memory.
fn note_mapped(state: &mut State, graph: Handle) {
    for at in 0..MOST {
        let Some(part) = state.table(Kind::Graph).get(key(graph, at)) else { return };
        part.holders = 1;
    }
}

/// Settles the GPUs of a graph.
fn settle_all(parts: &Parts) {
    for part in parts.iter() {
        // Memory that is not granted stays uncharged until the next reading.
        let _ = settle(part.gpu, part.device, None);
    }
}

/// Returns true if the driver keeps enough memory that no graph uses; it is charged already.
fn has_left(part: &Part) -> bool {
    let key = counter_of(part.gpu);
    let charged =
        with_state(|state| state.counters().get(key).map(|counter| counter.charged)).flatten();
    let used = cuda::graph_memory(part.device, USED);
    charged.zip(used).is_some_and(|(charged, used)| charged.saturating_sub(used) >= part.bytes)
}

fn charge(part: &Part) -> Result<Option<Charge>, Refusal> {
    let bytes = part.bytes.checked_next_multiple_of(GRANULARITY).unwrap_or(u64::MAX);
    match charge_gpu_once(part.gpu, bytes) {
        Err(Refusal::NotGranted | Refusal::NotYet) if has_left(part) => Ok(None),
        Err(Refusal::NotGranted | Refusal::NotYet) => charge_gpu(part.gpu, bytes).map(Some),
        charged => charged.map(Some),
    }
}

/// Charges the most that a graph may take of all its GPUs, or of none.
fn charge_all(parts: &Parts) -> Result<[Option<Charge>; MOST], Refusal> {
    let mut charges = [None; MOST];
    for (part, place) in parts.iter().zip(&mut charges) {
        match charge(part) {
            Ok(charge) => *place = charge,
            Err(refusal) => {
                charges.into_iter().flatten().for_each(Charge::undo);
                return Err(refusal);
            }
        }
    }
    Ok(charges)
}

/// Makes a call, and charges the memory that the driver keeps afterwards; returns true if all of it
/// is granted.
fn call_charged(
    parts: &Parts,
    charges: [Option<Charge>; MOST],
    take: impl FnOnce() -> c_int,
) -> (c_int, bool) {
    let result = take();
    let uncharged = parts
        .iter()
        .zip(charges)
        .filter(|(part, before)| settle(part.gpu, part.device, *before).is_err());
    (result, uncharged.count() == 0)
}

/// Makes a call that allocates the memory of an executable graph: the first one since it was
/// trimmed.
pub(super) fn with_memory(graph: Handle, real: impl FnOnce() -> c_int) -> c_int {
    if !is_used() {
        return real();
    }
    let Some((parts, has_all)) = with_state(|state| known(state, graph)) else { return real() };
    if parts.count == 0 {
        return real();
    }
    let charges = if has_all { Ok([None; MOST]) } else { charge_all(&parts) };
    let Ok(charges) = charges else { return OUT_OF_MEMORY };
    // Memory that is not granted stays uncharged until the next reading: the work is queued and
    // cannot be undone.
    let (result, _) = call_charged(&parts, charges, real);
    if result == SUCCESS {
        with_state(|state| note_mapped(state, graph));
    }
    result
}

/// Instantiates a graph, which may allocate its memory too.
///
/// # Safety
/// `out` is where the driver writes the executable graph.
unsafe fn instantiate(
    out: *mut Handle,
    graph: Handle,
    flags: u64,
    real: impl FnOnce() -> c_int,
) -> c_int {
    /// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`
    const UPLOAD: u64 = 2;
    let uploads = flags & UPLOAD != 0;
    let mut parts = Parts::default();
    let known = !graph.is_null() && add_up(graph, &mut parts, 0).is_some();
    if parts.count == 0 {
        // The driver refuses an unknown graph itself; one whose nodes it does not report cannot be
        // charged.
        return if known || graph.is_null() || Nodes::of(graph).is_none() {
            real()
        } else {
            OUT_OF_MEMORY
        };
    }
    if !known {
        return OUT_OF_MEMORY;
    }
    note_use();
    with_state(|state| {
        for part in parts.iter() {
            let device = usize::try_from(part.device).unwrap_or(0) + 1;
            driver_counted::begin(state, counter_of(part.gpu), part.gpu, device);
        }
    });
    let result = match charge_all(&parts) {
        Ok(charges) => call_charged(&parts, charges, real),
        // It needs no memory until it runs; if it has some, the counter shows it.
        Err(_) if !uploads => call_charged(&parts, [None; MOST], real),
        Err(_) => return OUT_OF_MEMORY,
    };
    if result.0 != SUCCESS {
        return result.0;
    }
    // SAFETY: the call succeeded: the driver has written there.
    let made = unsafe { out.read_unaligned() };
    if result.1 && with_state(|state| store(state, made, &parts)) == Some(true) {
        return SUCCESS;
    }
    cuda::destroy_executable_graph(made);
    settle_all(&parts);
    OUT_OF_MEMORY
}

/// Returns the flags of `CUDA_GRAPH_INSTANTIATE_PARAMS`.
///
/// # Safety
/// `parameters` are NULL or what the program wants the driver to read.
unsafe fn flags_in(parameters: *const c_void) -> u64 {
    // SAFETY: by this function's contract.
    if parameters.is_null() { 0 } else { unsafe { parameters.cast::<u64>().read_unaligned() } }
}

/// Updates an executable graph: it needs the memory of another graph from now on.
fn updated(graph: Handle, from: Handle, result: c_int) -> c_int {
    if result == SUCCESS {
        compute::graph_changed(graph);
    }
    let mut parts = Parts::default();
    if result == SUCCESS && add_up(from, &mut parts, 0).is_some() && parts.count > 0 {
        note_use();
        with_state(|state| store(state, graph, &parts));
    }
    result
}

/// Destroys an executable graph. It is removed before the call, because another thread may get its
/// handle right after.
fn destroy(graph: Handle, real: impl FnOnce() -> c_int) -> c_int {
    let parts = with_state(|state| forget(state, graph)).unwrap_or_default();
    let result = real();
    if result == SUCCESS {
        compute::graph_changed(graph);
    } else {
        with_state(|state| store(state, graph, &parts));
    }
    settle_all(&parts);
    result
}

hooks! {
    fn cuGraphInstantiate(
        out: *mut Handle, graph: Handle, node: *mut Handle, log: *mut c_char, length: usize,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe { instantiate(out, graph, 0, || real(out, graph, node, log, length)) }
    }

    fn cuGraphInstantiate_v2(
        out: *mut Handle, graph: Handle, node: *mut Handle, log: *mut c_char, length: usize,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe { instantiate(out, graph, 0, || real(out, graph, node, log, length)) }
    }

    fn cuGraphInstantiateWithFlags(out: *mut Handle, graph: Handle, flags: c_ulonglong) |real| {
        // SAFETY: the program's own call.
        unsafe { instantiate(out, graph, flags, || real(out, graph, flags)) }
    }

    fn cuGraphInstantiateWithParams(out: *mut Handle, graph: Handle, parameters: *mut c_void) |real| {
        // SAFETY: the program's own parameters, which begin with the flags; and its own call.
        unsafe { instantiate(out, graph, flags_in(parameters), || real(out, graph, parameters)) }
    }

    fn cuGraphInstantiateWithParams_ptsz(out: *mut Handle, graph: Handle, parameters: *mut c_void) |real| {
        // SAFETY: the program's own parameters, which begin with the flags; and its own call.
        unsafe { instantiate(out, graph, flags_in(parameters), || real(out, graph, parameters)) }
    }

    fn cuGraphUpload(graph: Handle, stream: Handle) |real| {
        // SAFETY: the program's own call.
        with_memory(graph, || unsafe { real(graph, stream) })
    }

    fn cuGraphUpload_ptsz(graph: Handle, stream: Handle) |real| {
        // SAFETY: the program's own call.
        with_memory(graph, || unsafe { real(graph, stream) })
    }

    fn cuGraphExecUpdate(graph: Handle, from: Handle, node: *mut Handle, outcome: *mut c_int) |real| {
        // SAFETY: the program's own call.
        updated(graph, from, unsafe { real(graph, from, node, outcome) })
    }

    fn cuGraphExecUpdate_v2(graph: Handle, from: Handle, outcome: *mut c_void) |real| {
        // SAFETY: the program's own call.
        updated(graph, from, unsafe { real(graph, from, outcome) })
    }

    fn cuGraphExecDestroy(graph: Handle) |real| {
        // SAFETY: the program's own call.
        destroy(graph, || unsafe { real(graph) })
    }

    fn cuDeviceGraphMemTrim(device: Device) |real| {
        // SAFETY: the program's own call.
        let result = unsafe { real(device) };
        with_state(note_trimmed);
        if let Some(gpu) = gpu_of(device).filter(|_| is_used()) {
            let _ = settle(gpu, device, None);
        }
        result
    }
}
