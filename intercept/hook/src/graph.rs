//! Memory of graphs.
//!
//! A node that takes memory reserves addresses; the memory comes with the upload or the launch of
//! the executable graph, from what the driver keeps for the graphs of a GPU until that is trimmed.
//! The driver counts it, and what it counts is paid (see [`crate::gauge`]). Which graph takes how
//! much is found out when it is instantiated: by then it does not matter how its nodes came into
//! it.

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use crate::charge::{Charge, Refusal, charge_gpu, charge_gpu_once, gpu_of};
use crate::compute;
use crate::cuda::{Device, Handle, Helper, OUT_OF_MEMORY, SUCCESS};
use crate::gauge::{self, GRAPH};
use crate::pointers::Cost;
use crate::root::with_state;
use crate::route::hooks;
use crate::state::{Kind, State};
use crate::sys::{self, Map};

static GET_NODES: Helper = Helper::new("cuGraphGetNodes");
static NODE_TYPE: Helper = Helper::new("cuGraphNodeGetType");
static ALLOC_PARAMETERS: Helper = Helper::new("cuGraphMemAllocNodeGetParams");
static CHILD_GRAPH: Helper = Helper::new("cuGraphChildGraphNodeGetGraph");
static MEMORY_ATTRIBUTE: Helper = Helper::new("cuDeviceGetGraphMemAttribute");
static TRIM: Helper = Helper::new("cuDeviceGraphMemTrim");

/// Forgets where the helpers are: the driver was loaded anew.
pub(crate) fn forget_helpers() {
    for helper in
        [&GET_NODES, &NODE_TYPE, &ALLOC_PARAMETERS, &CHILD_GRAPH, &MEMORY_ATTRIBUTE, &TRIM]
    {
        helper.forget();
    }
}

/// Whether this process has an executable graph that takes memory. Launches of others shall cost
/// nothing here.
static ANY: AtomicBool = AtomicBool::new(false);

/// The driver takes memory for graphs in multiples of this at least.
const GRANULARITY: u64 = 2 << 20;

/// GPUs that the nodes of one graph can take memory of.
const MOST: usize = 8;

/// `CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT` and `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
const USED: c_int = 0;
const RESERVED: c_int = 2;

/// What a graph takes of one GPU.
#[derive(Clone, Copy, Default)]
struct Part {
    gpu: u32,
    device: Device,
    bytes: u64,
}

/// What a graph takes.
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

/// Calls a function with a handle and somewhere to put the result.
fn ask<T>(helper: &Helper, handle: Handle, result: *mut T) -> Option<()> {
    type Real = unsafe extern "C" fn(Handle, *mut c_void) -> c_int;
    // SAFETY: the types are those of cuda.h, for all functions that this is called with.
    let real = unsafe { core::mem::transmute::<usize, Real>(helper.address()?) };
    // SAFETY: the result goes to a variable of ours.
    (unsafe { real(handle, result.cast()) } == SUCCESS).then_some(())
}

/// The nodes of a graph in memory of the kernel's.
struct Nodes {
    at: *mut Handle,
    count: usize,
}

impl Nodes {
    fn of(graph: Handle) -> Option<Self> {
        type Real = unsafe extern "C" fn(Handle, *mut Handle, *mut usize) -> c_int;
        // SAFETY: the type is that of cuda.h.
        let real = unsafe { core::mem::transmute::<usize, Real>(GET_NODES.address()?) };
        let mut count = 0;
        // SAFETY: asks for the number only.
        if unsafe { real(graph, core::ptr::null_mut(), &mut count) } != SUCCESS {
            return None;
        }
        let at = sys::map(Map::Private, Self::length(count))?.cast();
        let nodes = Self { at, count };
        // SAFETY: there is room for so many.
        (unsafe { real(graph, at, &mut count) } == SUCCESS && count <= nodes.count).then_some(nodes)
    }

    fn length(count: usize) -> usize {
        (count * size_of::<Handle>()).next_multiple_of(4096).max(4096)
    }

    fn iter(&self) -> impl Iterator<Item = Handle> {
        // SAFETY: mapped with room for so many, and read before it goes.
        (0..self.count).map(|index| unsafe { self.at.add(index).read() })
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        // SAFETY: mapped with that length, and referred to by nobody else.
        unsafe { sys::unmap(self.at.cast(), Self::length(self.count)) };
    }
}

/// Adds up what the nodes of a graph and of the graphs in it take. `None` where that cannot be
/// found out.
fn add_up(graph: Handle, parts: &mut Parts, depth: usize) -> Option<()> {
    /// `CU_GRAPH_NODE_TYPE_GRAPH` and `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
    const CHILD: c_uint = 4;
    const ALLOC: c_uint = 10;
    /// Graphs in graphs, more than which nobody has.
    const DEEPEST: usize = 64;
    if depth > DEEPEST {
        return None;
    }
    for node in Nodes::of(graph)?.iter() {
        let mut kind: c_uint = 0;
        ask(&NODE_TYPE, node, &mut kind)?;
        if kind == ALLOC {
            add_node(node, parts)?;
        } else if kind == CHILD {
            let mut child: Handle = core::ptr::null_mut();
            ask(&CHILD_GRAPH, node, &mut child)?;
            add_up(child, parts, depth + 1)?;
        }
    }
    Some(())
}

fn add_node(node: Handle, parts: &mut Parts) -> Option<()> {
    /// Where the location's type and number, and the size lie in `CUDA_MEM_ALLOC_NODE_PARAMS`, in
    /// words of 64 bits.
    const LOCATION: usize = 1;
    const BYTES: usize = 13;
    /// `CU_MEM_LOCATION_TYPE_DEVICE`
    const ON_DEVICE: u64 = 1;
    // More than any version of the parameters has.
    let mut parameters = [0_u64; 64];
    ask(&ALLOC_PARAMETERS, node, &mut parameters)?;
    let [location, bytes] = [LOCATION, BYTES].map(|at| parameters.get(at).copied().unwrap_or(0));
    if location & u64::from(u32::MAX) != ON_DEVICE {
        return Some(());
    }
    let device = (location >> 32) as Device;
    parts.add(Part { gpu: gpu_of(device)?, device, bytes })
}

/// The key of what an executable graph takes of its first GPU, its second and so on; handles have
/// none of these bits.
fn key(graph: Handle, part: usize) -> u64 {
    graph as u64 | (part as u64) << 56
}

/// Remembers what an executable graph takes; `context` is the device + 1.
fn remember(state: &mut State, graph: Handle, parts: &Parts) -> bool {
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
        gauge::begin(state, GRAPH | u64::from(part.gpu), part.gpu, device);
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

/// What an executable graph takes, and whether it has all of that since it ran last.
fn known(state: &mut State, graph: Handle) -> (Parts, bool) {
    let (mut parts, mut has_all) = (Parts::default(), true);
    for at in 0..MOST {
        let Some(part) = state.table(Kind::Graph).get(key(graph, at)).copied() else { break };
        parts.add(part_of(part));
        has_all &= part.holders > 0;
    }
    (parts, has_all)
}

/// Notes that an executable graph has its memory, or that all have lost theirs.
fn note_mapped(state: &mut State, graph: Handle) {
    for at in 0..MOST {
        let Some(part) = state.table(Kind::Graph).get(key(graph, at)) else { return };
        part.holders = 1;
    }
}

fn note_trimmed(state: &mut State) {
    let mut place = 0;
    while let Some((key, next)) = state.table(Kind::Graph).key_from(place) {
        place = next;
        if let Some(part) = state.table(Kind::Graph).get(key) {
            part.holders = 0;
        }
    }
}

/// One of the counters of a device.
fn attribute(device: Device, which: c_int) -> Option<u64> {
    type Real = unsafe extern "C" fn(Device, c_int, *mut c_void) -> c_int;
    // SAFETY: the type is that of cuda.h.
    let real = unsafe { core::mem::transmute::<usize, Real>(MEMORY_ATTRIBUTE.address()?) };
    let mut bytes = 0_u64;
    // SAFETY: the counters are 64-bit.
    (unsafe { real(device, which, (&raw mut bytes).cast()) } == SUCCESS).then_some(bytes)
}

fn settle(gpu: u32, device: Device, before: Option<Charge>) -> Result<(), Refusal> {
    gauge::settle(GRAPH | u64::from(gpu), before, || attribute(device, RESERVED))
}

/// Pays what is kept for graphs on the GPUs of one.
fn pay(parts: &Parts) {
    for part in parts.iter() {
        // What is beyond the grant stays unpaid until it can be.
        let _ = settle(part.gpu, part.device, None);
    }
}

/// Whether what is kept for graphs, and no graph uses, is enough; that is paid already.
fn has_left(part: &Part) -> bool {
    let paid =
        with_state(|state| state.gauges().get(GRAPH | u64::from(part.gpu)).map(|gauge| gauge.paid))
            .flatten();
    let used = attribute(part.device, USED);
    paid.zip(used).is_some_and(|(paid, used)| paid.saturating_sub(used) >= part.bytes)
}

fn charge(part: &Part) -> Result<Option<Charge>, Refusal> {
    let bytes = part.bytes.checked_next_multiple_of(GRANULARITY).unwrap_or(u64::MAX);
    match charge_gpu_once(part.gpu, bytes) {
        Err(Refusal::NotGranted | Refusal::NotYet) if has_left(part) => Ok(None),
        Err(Refusal::NotGranted | Refusal::NotYet) => charge_gpu(part.gpu, bytes).map(Some),
        charged => charged.map(Some),
    }
}

/// Charges what a graph may take of all its GPUs, or of none.
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

/// Makes a call, and pays what the driver keeps then; answers whether all of that is granted.
fn charged(
    parts: &Parts,
    charges: [Option<Charge>; MOST],
    take: impl FnOnce() -> c_int,
) -> (c_int, bool) {
    let result = take();
    let unpaid = parts
        .iter()
        .zip(charges)
        .filter(|(part, before)| settle(part.gpu, part.device, *before).is_err());
    (result, unpaid.count() == 0)
}

/// A call that gives an executable graph its memory: the first time since it was trimmed.
pub(crate) fn with_memory(graph: Handle, real: impl FnOnce() -> c_int) -> c_int {
    if !ANY.load(Ordering::Relaxed) {
        return real();
    }
    let Some((parts, has_all)) = with_state(|state| known(state, graph)) else { return real() };
    if parts.count == 0 {
        return real();
    }
    let charges = if has_all { Ok([None; MOST]) } else { charge_all(&parts) };
    let Ok(charges) = charges else { return OUT_OF_MEMORY };
    // What is beyond the grant stays unpaid until it can be: the work is queued, and cannot be
    // taken back.
    let (result, _) = charged(&parts, charges, real);
    if result == SUCCESS {
        with_state(|state| note_mapped(state, graph));
    }
    result
}

/// Makes a graph executable, which may give it its memory too.
///
/// # Safety
/// `out` is where the driver is to put it.
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
        // A graph that the driver does not know it refuses itself; one whose nodes it does not tell
        // is not to be charged.
        return if known || graph.is_null() || Nodes::of(graph).is_none() {
            real()
        } else {
            OUT_OF_MEMORY
        };
    }
    if !known {
        return OUT_OF_MEMORY;
    }
    ANY.store(true, Ordering::Relaxed);
    with_state(|state| {
        for part in parts.iter() {
            let device = usize::try_from(part.device).unwrap_or(0) + 1;
            gauge::begin(state, GRAPH | u64::from(part.gpu), part.gpu, device);
        }
    });
    let result = match charge_all(&parts) {
        Ok(charges) => charged(&parts, charges, real),
        // As long as it does not run it needs no memory; should it have some, that shows.
        Err(_) if !uploads => charged(&parts, [None; MOST], real),
        Err(_) => return OUT_OF_MEMORY,
    };
    if result.0 != SUCCESS {
        return result.0;
    }
    // SAFETY: the driver was content and has written there.
    let made = unsafe { out.read_unaligned() };
    if result.1 && with_state(|state| remember(state, made, &parts)) == Some(true) {
        return SUCCESS;
    }
    destroy_in_vain(made);
    pay(&parts);
    OUT_OF_MEMORY
}

/// The flags in `CUDA_GRAPH_INSTANTIATE_PARAMS`.
///
/// # Safety
/// `parameters` are NULL or what the program wants the driver to read.
unsafe fn flags_in(parameters: *const c_void) -> u64 {
    // SAFETY: by this function's contract.
    if parameters.is_null() { 0 } else { unsafe { parameters.cast::<u64>().read_unaligned() } }
}

fn destroy_in_vain(graph: Handle) {
    // SAFETY: it takes one handle; the program has not seen this one.
    unsafe { cuGraphExecDestroy::ROUTE.give_back(graph as u64) };
}

/// An executable graph takes what another graph takes from now on.
fn updated(graph: Handle, from: Handle, result: c_int) -> c_int {
    if result == SUCCESS {
        compute::graph_is_gone(graph);
    }
    let mut parts = Parts::default();
    if result == SUCCESS && add_up(from, &mut parts, 0).is_some() && parts.count > 0 {
        ANY.store(true, Ordering::Relaxed);
        with_state(|state| remember(state, graph, &parts));
    }
    result
}

/// Destroys an executable graph: forgotten before, since another thread may get its handle right
/// after.
fn destroy(graph: Handle, real: impl FnOnce() -> c_int) -> c_int {
    let parts = with_state(|state| forget(state, graph)).unwrap_or_default();
    let result = real();
    if result == SUCCESS {
        compute::graph_is_gone(graph);
    } else {
        with_state(|state| remember(state, graph, &parts));
    }
    pay(&parts);
    result
}

/// Pays what is kept for the graphs of all GPUs now.
pub(crate) fn refresh() {
    if ANY.load(Ordering::Relaxed) {
        each(|gpu, device| {
            let _ = settle(gpu, device, None);
        });
    }
}

/// Has the driver let go of what no graph uses. Answers whether there are graphs that take memory.
pub(crate) fn trim() -> bool {
    if !ANY.load(Ordering::Relaxed) {
        return false;
    }
    each(|gpu, device| {
        type Real = unsafe extern "C" fn(Device) -> c_int;
        if let Some(address) = TRIM.address() {
            // SAFETY: the type is that of cuda.h.
            unsafe { core::mem::transmute::<usize, Real>(address)(device) };
        }
        with_state(note_trimmed);
        let _ = settle(gpu, device, None);
    });
    true
}

fn each(mut run: impl FnMut(u32, Device)) {
    let mut place = 0;
    while let Some(Some((key, next))) = with_state(|state| state.gauges().key_from(place)) {
        place = next;
        let gauge = with_state(|state| state.gauges().get(key).copied()).flatten();
        if let Some(gauge) = gauge.filter(|_| gauge::kind(key) == GRAPH) {
            run(gauge.gpu, gauge.handle as Device - 1);
        }
    }
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
        if let Some(gpu) = gpu_of(device).filter(|_| ANY.load(Ordering::Relaxed)) {
            let _ = settle(gpu, device, None);
        }
        result
    }
}
