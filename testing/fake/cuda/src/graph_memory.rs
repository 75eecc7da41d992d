//! Memory of graphs: nodes that allocate and free it, and the memory reserved for the graphs of a
//! GPU.
//!
//! A node has its address from its creation. The memory is charged when the executable graph is
//! uploaded or launched. It stays with the graph until the graph is destroyed, or until the reserve
//! is trimmed while nothing of it is allocated.

use std::collections::HashSet;
use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::allocation::{Allocation, AllocationKind, refund};
use crate::capture;
use crate::context::current;
use crate::device::{Device, gpu};
use crate::graph::{Graph, Node, NodeKind, handles};
use crate::pool::ON_DEVICE;
use crate::state::{self, Handle, State};
use crate::status::Status;

/// Size by which the reserve grows and shrinks.
const CHUNK: u64 = 2 << 20;

/// Memory of a graph's nodes: GPU, bytes, address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GraphMemory {
    allocations: Vec<(usize, u64, u64)>,
    frees: Vec<u64>,
}

/// Memory reserved for the graphs of a GPU.
#[derive(Debug, Default)]
pub(crate) struct GraphReserve {
    reserved: u64,
    used: u64,
    reserved_high: u64,
    used_high: u64,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocParameters {
    kind: c_int,
    handle_types: c_int,
    location_type: c_int,
    location: c_int,
    windows: *const c_void,
    rest: [u64; 8],
    access: *const c_void,
    accesses: usize,
    bytes: usize,
    address: u64,
}

const _: () = assert!(std::mem::offset_of!(AllocParameters, bytes) == 104);

impl State {
    /// Returns the memory operations of a graph's nodes.
    pub(crate) fn memory_of_graph(&self, graph: Handle) -> CuResult<GraphMemory> {
        let mut memory = GraphMemory::default();
        for kind in self.kinds_of(graph)? {
            match kind {
                NodeKind::Alloc { gpu, bytes, address } => {
                    memory.allocations.push((gpu, bytes, address))
                }
                NodeKind::Free { address } => memory.frees.push(address),
                NodeKind::Child(child) => {
                    let more = self.memory_of_graph(child)?;
                    memory.allocations.extend(more.allocations);
                    memory.frees.extend(more.frees);
                }
                _ => {}
            }
        }
        Ok(memory)
    }

    /// Returns a new node that allocates memory, and its address.
    pub(crate) fn alloc_node(&mut self, gpu: usize, bytes: u64) -> CuResult<(NodeKind, u64)> {
        let bytes = bytes.next_multiple_of(512);
        let address = self.new_addresses(gpu, bytes, 512)?;
        Ok((NodeKind::Alloc { gpu, bytes, address }, address))
    }

    /// Reserves the memory of an executable graph, unless it is mapped already.
    pub(crate) fn map_graph(&mut self, graph: Handle, memory: &GraphMemory) -> CuResult {
        if memory.allocations.is_empty() || self.mapped_graphs.contains(&graph) {
            return Ok(());
        }
        for (at, (gpu, bytes, _)) in memory.allocations.iter().enumerate() {
            if let Err(error) = self.reserve_for_graph(*gpu, *bytes) {
                memory
                    .allocations
                    .iter()
                    .take(at)
                    .for_each(|(gpu, bytes, _)| self.release_graph_bytes(*gpu, *bytes));
                return Err(error);
            }
        }
        self.mapped_graphs.insert(graph);
        Ok(())
    }

    fn reserve_for_graph(&mut self, gpu: usize, bytes: u64) -> CuResult {
        let reserve = self.graph_reserves.entry(gpu).or_default();
        let wanted = (reserve.used + bytes).next_multiple_of(CHUNK).max(reserve.reserved);
        let more = wanted - reserve.reserved;
        self.charge(gpu, more)?;
        let reserve = self.graph_reserves.entry(gpu).or_default();
        (reserve.reserved, reserve.used) = (reserve.reserved + more, reserve.used + bytes);
        reserve.reserved_high = reserve.reserved_high.max(reserve.reserved);
        reserve.used_high = reserve.used_high.max(reserve.used);
        Ok(())
    }

    fn release_graph_bytes(&mut self, gpu: usize, bytes: u64) {
        let reserve = self.graph_reserves.entry(gpu).or_default();
        reserve.used -= bytes;
    }

    /// Launches a graph: allocations that it does not free belong to the program.
    pub(crate) fn charge_graph(&mut self, graph: Handle, memory: &GraphMemory) -> CuResult {
        let context = current().ok_or(Status::InvalidContext)?;
        let own: HashSet<u64> = memory.allocations.iter().map(|(_, _, address)| *address).collect();
        let reserve = |address: &u64| !memory.frees.contains(address);
        if own
            .iter()
            .filter(|address| reserve(address))
            .any(|address| self.allocations.contains_key(address))
        {
            return Err(Status::InvalidValue);
        }
        for (gpu, bytes, address) in
            memory.allocations.iter().filter(|(_, _, address)| reserve(address))
        {
            let (gpu, bytes) = (*gpu, *bytes);
            self.allocations.insert(
                *address,
                Allocation { gpu, context, bytes, kind: AllocationKind::Graph(graph) },
            );
        }
        for address in memory.frees.iter().filter(|address| !own.contains(address)) {
            self.free(*address)?;
        }
        Ok(())
    }

    /// Frees an allocation of a graph. The memory stays with the graph if the graph still exists.
    pub(crate) fn return_to_graph(&mut self, graph: Handle, gpu: usize, bytes: u64) {
        if !self.executable_graphs.contains_key(&graph) {
            self.release_graph_bytes(gpu, bytes);
        }
    }

    fn is_allocated(&self, address: u64) -> bool {
        self.allocations.contains_key(&address)
    }

    /// Releases the memory of an executable graph, except for allocations of the program.
    pub(crate) fn unmap_graph(&mut self, graph: Handle, memory: &GraphMemory) {
        if self.mapped_graphs.remove(&graph) {
            for (gpu, bytes, address) in &memory.allocations {
                if !self.is_allocated(*address) {
                    self.release_graph_bytes(*gpu, *bytes);
                }
            }
        }
    }

    /// Releases memory that no graph uses.
    pub(crate) fn trim_graphs(&mut self, gpu: usize) -> CuResult {
        let idle: Vec<_> = self.mapped_graphs.iter().copied().collect();
        for graph in idle {
            let Some(memory) = self.executable_graphs.get(&graph).map(|graph| graph.memory.clone())
            else {
                continue;
            };
            if !memory.allocations.iter().any(|(_, _, address)| self.is_allocated(*address)) {
                self.unmap_graph(graph, &memory);
            }
        }
        let Some(reserve) = self.graph_reserves.get_mut(&gpu) else { return Ok(()) };
        let target = reserve.used.next_multiple_of(CHUNK);
        let less = reserve.reserved - target;
        reserve.reserved = target;
        refund(gpu, less)
    }
}

fn add_alloc(
    out: OutPtr<Handle>,
    graph: Handle,
    after: Vec<Handle>,
    parameters: *mut AllocParameters,
) -> CuResult {
    out.check()?;
    let mut parameters_in = InPtr::<AllocParameters>::from(parameters.cast()).get()?;
    if (parameters_in.kind, parameters_in.handle_types, parameters_in.location_type)
        != (1, 0, ON_DEVICE)
        || parameters_in.bytes == 0
    {
        return Err(Status::InvalidValue);
    }
    let gpu = gpu(Device::at(parameters_in.location))?;
    let mut state = state::lock()?;
    let (kind, address) = state.alloc_node(gpu, parameters_in.bytes as u64)?;
    let node = state.add_node(graph, Node { kind, after })?;
    parameters_in.address = address;
    OutPtr::from(parameters.cast()).set(parameters_in)?;
    out.set(node)
}

fn add(out: OutPtr<Handle>, graph: Handle, after: Vec<Handle>, kind: NodeKind) -> CuResult {
    out.check()?;
    out.set(state::lock()?.add_node(graph, Node { kind, after })?)
}

/// Adds a node of any kind.
fn add_any(
    out: OutPtr<Handle>,
    graph: Handle,
    after: Vec<Handle>,
    parameters: *mut u8,
) -> CuResult {
    let kind: c_int = InPtr::from(parameters.cast()).get()?;
    let inner = parameters.wrapping_add(16);
    let handle = || InPtr::<Handle>::from(inner.cast()).get();
    match kind {
        4 => add(out, graph, after, NodeKind::Child(handle()?)),
        5 => add(out, graph, after, NodeKind::Empty),
        6 => add(out, graph, after, NodeKind::WaitEvent),
        7 => add(out, graph, after, NodeKind::RecordEvent(handle()?)),
        10 => add_alloc(out, graph, after, inner.cast()),
        11 => {
            let address = InPtr::from(inner.cast()).get()?;
            add(out, graph, after, NodeKind::Free { address })
        }
        _ => Err(Status::NotSupported),
    }
}

export! {
    fn cuGraphCreate(graph: OutPtr<Handle>, flags: c_uint) {
        graph.check()?;
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        let mut state = state::lock()?;
        let handle = state.new_handle();
        state.graphs.insert(handle, Graph::default());
        graph.set(handle)
    }

    fn cuGraphAddEmptyNode(out: OutPtr<Handle>, graph: Handle, after: *const Handle, count: usize) {
        add(out, graph, handles(after, count)?, NodeKind::Empty)
    }

    fn cuGraphAddMemAllocNode(
        out: OutPtr<Handle>,
        graph: Handle,
        after: *const Handle,
        count: usize,
        parameters: *mut AllocParameters,
    ) {
        add_alloc(out, graph, handles(after, count)?, parameters)
    }

    fn cuGraphAddMemFreeNode(out: OutPtr<Handle>, graph: Handle, after: *const Handle, count: usize, address: u64) {
        add(out, graph, handles(after, count)?, NodeKind::Free { address })
    }

    fn cuGraphAddChildGraphNode(
        out: OutPtr<Handle>,
        graph: Handle,
        after: *const Handle,
        count: usize,
        child: Handle,
    ) {
        state::lock()?.graphs.get(&child).ok_or(Status::InvalidHandle)?;
        add(out, graph, handles(after, count)?, NodeKind::Child(child))
    }

    fn cuGraphAddEventRecordNode(out: OutPtr<Handle>, graph: Handle, after: *const Handle, count: usize, event: Handle) {
        state::lock()?.events.get(&event).ok_or(Status::InvalidHandle)?;
        add(out, graph, handles(after, count)?, NodeKind::RecordEvent(event))
    }

    fn cuGraphAddEventWaitNode(out: OutPtr<Handle>, graph: Handle, after: *const Handle, count: usize, event: Handle) {
        state::lock()?.events.get(&event).ok_or(Status::InvalidHandle)?;
        add(out, graph, handles(after, count)?, NodeKind::WaitEvent)
    }

    fn cuGraphAddNode(out: OutPtr<Handle>, graph: Handle, after: *const Handle, count: usize, parameters: *mut u8) {
        add_any(out, graph, handles(after, count)?, parameters)
    }

    fn cuGraphAddNode_v2(
        out: OutPtr<Handle>,
        graph: Handle,
        after: *const Handle,
        edges: *const c_void,
        count: usize,
        parameters: *mut u8,
    ) {
        let _ = edges;
        add_any(out, graph, handles(after, count)?, parameters)
    }

    fn cuGraphMemAllocNodeGetParams(node: Handle, parameters: OutPtr<AllocParameters>) {
        let state = state::lock()?;
        let Some(NodeKind::Alloc { gpu, bytes, address }) = state.nodes.get(&node).map(|node| node.kind) else {
            return Err(Status::InvalidValue);
        };
        parameters.set(AllocParameters {
            kind: 1,
            handle_types: 0,
            location_type: ON_DEVICE,
            location: Device::of(gpu).ordinal(),
            windows: std::ptr::null(),
            rest: [0; 8],
            access: std::ptr::null(),
            accesses: 0,
            bytes: bytes as usize,
            address,
        })
    }

    fn cuGraphChildGraphNodeGetGraph(node: Handle, graph: OutPtr<Handle>) {
        match state::lock()?.nodes.get(&node).map(|node| node.kind) {
            Some(NodeKind::Child(child)) => graph.set(child),
            _ => Err(Status::InvalidValue),
        }
    }

    fn cuDeviceGetGraphMemAttribute(device: Device, attribute: c_int, value: OutPtr<u64>) {
        value.check()?;
        let gpu = gpu(device)?;
        let mut state = state::lock()?;
        let reserve = state.graph_reserves.entry(gpu).or_default();
        value.set(match attribute {
            0 => reserve.used,
            1 => reserve.used_high,
            2 => reserve.reserved,
            3 => reserve.reserved_high,
            _ => return Err(Status::InvalidValue),
        })
    }

    fn cuDeviceGraphMemTrim(device: Device) {
        let gpu = gpu(device)?;
        let mut state = state::lock()?;
        capture::check_unsafe(&mut state)?;
        state.trim_graphs(gpu)
    }
}
