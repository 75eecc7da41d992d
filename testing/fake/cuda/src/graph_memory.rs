//! Memory of graphs: nodes that take it and free it, and what is kept for the graphs of a GPU.
//!
//! A node has its address from the beginning; the memory comes when the executable graph is
//! uploaded or launched, and stays with it until it is destroyed or what is kept for graphs is
//! trimmed while nobody holds any of it.

use std::collections::HashSet;
use std::ffi::{c_int, c_uint, c_void};

use crate::abi::{Answer, In, Out, export};
use crate::allocation::{Allocation, Kind, discharge};
use crate::context::current;
use crate::device::{Device, gpu};
use crate::graph::Graph;
use crate::pool::ON_DEVICE;
use crate::state::{self, Handle, State};
use crate::status::Status;

/// What is kept grows and shrinks by this.
const CHUNK: u64 = 2 << 20;

/// A node.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Node {
    Empty,
    Alloc { gpu: usize, bytes: u64, address: u64 },
    Free { address: u64 },
    Child(Handle),
}

/// What the nodes of a graph take: GPU, bytes, address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GraphMemory {
    takes: Vec<(usize, u64, u64)>,
    frees: Vec<u64>,
}

/// What is kept for the graphs of a GPU.
#[derive(Debug, Default)]
pub(crate) struct Kept {
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
    /// Adds up what the nodes of a graph do with memory.
    pub(crate) fn memory_of_graph(&self, graph: Handle) -> Answer<GraphMemory> {
        let mut memory = GraphMemory::default();
        for node in &self.graphs.get(&graph).ok_or(Status::InvalidHandle)?.nodes {
            match self.nodes.get(node) {
                Some(Node::Alloc { gpu, bytes, address }) => {
                    memory.takes.push((*gpu, *bytes, *address))
                }
                Some(Node::Free { address }) => memory.frees.push(*address),
                Some(Node::Child(child)) => {
                    let more = self.memory_of_graph(*child)?;
                    memory.takes.extend(more.takes);
                    memory.frees.extend(more.frees);
                }
                Some(Node::Empty) | None => {}
            }
        }
        Ok(memory)
    }

    fn add_node(&mut self, graph: Handle, node: Node) -> Answer<Handle> {
        let handle = self.new_handle();
        self.graphs.get_mut(&graph).ok_or(Status::InvalidHandle)?.nodes.push(handle);
        self.nodes.insert(handle, node);
        Ok(handle)
    }

    /// A node that takes memory, with an address of its own.
    pub(crate) fn new_alloc_node(&mut self, gpu: usize, bytes: u64) -> Answer<(Handle, u64)> {
        let bytes = bytes.next_multiple_of(512);
        let address = self.new_addresses(gpu, bytes, 512)?;
        let handle = self.new_handle();
        self.nodes.insert(handle, Node::Alloc { gpu, bytes, address });
        Ok((handle, address))
    }

    /// A node that frees memory.
    pub(crate) fn new_free_node(&mut self, address: u64) -> Handle {
        let handle = self.new_handle();
        self.nodes.insert(handle, Node::Free { address });
        handle
    }

    /// Gives an executable graph its memory, unless it has it.
    pub(crate) fn map_graph(&mut self, graph: Handle, memory: &GraphMemory) -> Answer {
        if memory.takes.is_empty() || self.mapped_graphs.contains(&graph) {
            return Ok(());
        }
        for (at, (gpu, bytes, _)) in memory.takes.iter().enumerate() {
            if let Err(error) = self.keep_for_graphs(*gpu, *bytes) {
                memory
                    .takes
                    .iter()
                    .take(at)
                    .for_each(|(gpu, bytes, _)| self.unused_by_graph(*gpu, *bytes));
                return Err(error);
            }
        }
        self.mapped_graphs.insert(graph);
        Ok(())
    }

    fn keep_for_graphs(&mut self, gpu: usize, bytes: u64) -> Answer {
        let kept = self.kept_for_graphs.entry(gpu).or_default();
        let wanted = (kept.used + bytes).next_multiple_of(CHUNK).max(kept.reserved);
        let more = wanted - kept.reserved;
        self.charge(gpu, more)?;
        let kept = self.kept_for_graphs.entry(gpu).or_default();
        (kept.reserved, kept.used) = (kept.reserved + more, kept.used + bytes);
        kept.reserved_high = kept.reserved_high.max(kept.reserved);
        kept.used_high = kept.used_high.max(kept.used);
        Ok(())
    }

    fn unused_by_graph(&mut self, gpu: usize, bytes: u64) {
        let kept = self.kept_for_graphs.entry(gpu).or_default();
        kept.used -= bytes;
    }

    /// A launch: what the graph takes and does not free is the program's.
    pub(crate) fn take_for_graph(&mut self, graph: Handle, memory: &GraphMemory) -> Answer {
        let context = current().ok_or(Status::InvalidContext)?;
        let own: HashSet<u64> = memory.takes.iter().map(|(_, _, address)| *address).collect();
        let kept = |address: &u64| !memory.frees.contains(address);
        if own
            .iter()
            .filter(|address| kept(address))
            .any(|address| self.allocations.contains_key(address))
        {
            return Err(Status::InvalidValue);
        }
        for (gpu, bytes, address) in memory.takes.iter().filter(|(_, _, address)| kept(address)) {
            let (gpu, bytes) = (*gpu, *bytes);
            self.allocations
                .insert(*address, Allocation { gpu, context, bytes, kind: Kind::Graph(graph) });
        }
        for address in memory.frees.iter().filter(|address| !own.contains(address)) {
            self.free(*address)?;
        }
        Ok(())
    }

    /// A piece that a graph took is freed: the memory stays with the graph, if that is still there.
    pub(crate) fn return_to_graph(&mut self, graph: Handle, gpu: usize, bytes: u64) {
        if !self.executable_graphs.contains_key(&graph) {
            self.unused_by_graph(gpu, bytes);
        }
    }

    fn is_out(&self, address: u64) -> bool {
        self.allocations.contains_key(&address)
    }

    /// An executable graph lets go of its memory, but for what the program still holds of it.
    pub(crate) fn unmap_graph(&mut self, graph: Handle, memory: &GraphMemory) {
        if self.mapped_graphs.remove(&graph) {
            for (gpu, bytes, address) in &memory.takes {
                if !self.is_out(*address) {
                    self.unused_by_graph(*gpu, *bytes);
                }
            }
        }
    }

    /// Gives back what no graph uses.
    pub(crate) fn trim_graphs(&mut self, gpu: usize) -> Answer {
        let idle: Vec<_> = self.mapped_graphs.iter().copied().collect();
        for graph in idle {
            let Some(memory) = self.executable_graphs.get(&graph).map(|graph| graph.memory.clone())
            else {
                continue;
            };
            if !memory.takes.iter().any(|(_, _, address)| self.is_out(*address)) {
                self.unmap_graph(graph, &memory);
            }
        }
        let Some(kept) = self.kept_for_graphs.get_mut(&gpu) else { return Ok(()) };
        let target = kept.used.next_multiple_of(CHUNK);
        let less = kept.reserved - target;
        kept.reserved = target;
        discharge(gpu, less)
    }
}

fn add_alloc(out: Out<Handle>, graph: Handle, parameters: *mut AllocParameters) -> Answer {
    out.check()?;
    let mut asked = In::<AllocParameters>::from(parameters.cast()).get()?;
    if (asked.kind, asked.handle_types, asked.location_type) != (1, 0, ON_DEVICE)
        || asked.bytes == 0
    {
        return Err(Status::InvalidValue);
    }
    let gpu = gpu(Device::at(asked.location))?;
    let mut state = state::lock()?;
    let (node, address) = state.new_alloc_node(gpu, asked.bytes as u64)?;
    state.graphs.get_mut(&graph).ok_or(Status::InvalidHandle)?.nodes.push(node);
    asked.address = address;
    Out::from(parameters.cast()).set(asked)?;
    out.set(node)
}

fn add(out: Out<Handle>, graph: Handle, node: Node) -> Answer {
    out.check()?;
    out.set(state::lock()?.add_node(graph, node)?)
}

/// A node of any kind.
fn add_any(out: Out<Handle>, graph: Handle, parameters: *mut u8) -> Answer {
    let kind: c_int = In::from(parameters.cast()).get()?;
    let inner = parameters.wrapping_add(16);
    match kind {
        4 => add(out, graph, Node::Child(In::from(inner.cast()).get()?)),
        5 => add(out, graph, Node::Empty),
        10 => add_alloc(out, graph, inner.cast()),
        11 => add(out, graph, Node::Free { address: In::from(inner.cast()).get()? }),
        _ => Err(Status::NotSupported),
    }
}

export! {
    fn cuGraphCreate(graph: Out<Handle>, flags: c_uint) {
        graph.check()?;
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        let mut state = state::lock()?;
        let handle = state.new_handle();
        state.graphs.insert(handle, Graph::default());
        graph.set(handle)
    }

    fn cuGraphAddEmptyNode(out: Out<Handle>, graph: Handle, after: *const Handle, count: usize) {
        let _ = (after, count);
        add(out, graph, Node::Empty)
    }

    fn cuGraphAddMemAllocNode(
        out: Out<Handle>,
        graph: Handle,
        after: *const Handle,
        count: usize,
        parameters: *mut AllocParameters,
    ) {
        let _ = (after, count);
        add_alloc(out, graph, parameters)
    }

    fn cuGraphAddMemFreeNode(out: Out<Handle>, graph: Handle, after: *const Handle, count: usize, address: u64) {
        let _ = (after, count);
        add(out, graph, Node::Free { address })
    }

    fn cuGraphAddChildGraphNode(
        out: Out<Handle>,
        graph: Handle,
        after: *const Handle,
        count: usize,
        child: Handle,
    ) {
        let _ = (after, count);
        state::lock()?.graphs.get(&child).ok_or(Status::InvalidHandle)?;
        add(out, graph, Node::Child(child))
    }

    fn cuGraphAddNode(out: Out<Handle>, graph: Handle, after: *const Handle, count: usize, parameters: *mut u8) {
        let _ = (after, count);
        add_any(out, graph, parameters)
    }

    fn cuGraphAddNode_v2(
        out: Out<Handle>,
        graph: Handle,
        after: *const Handle,
        edges: *const c_void,
        count: usize,
        parameters: *mut u8,
    ) {
        let _ = (after, edges, count);
        add_any(out, graph, parameters)
    }

    fn cuGraphGetNodes(graph: Handle, nodes: Out<Handle>, count: Out<usize>) {
        count.check()?;
        let state = state::lock()?;
        let all = &state.graphs.get(&graph).ok_or(Status::InvalidHandle)?.nodes;
        if nodes.check().is_ok() {
            let room = In::<usize>::from(count.pointer().cast()).get()?;
            for (at, node) in all.iter().take(room).enumerate() {
                nodes.at(at).set(*node)?;
            }
        }
        count.set(all.len())
    }

    fn cuGraphNodeGetType(node: Handle, kind: Out<c_uint>) {
        kind.set(match state::lock()?.nodes.get(&node).ok_or(Status::InvalidHandle)? {
            Node::Child(_) => 4,
            Node::Empty => 5,
            Node::Alloc { .. } => 10,
            Node::Free { .. } => 11,
        })
    }

    fn cuGraphMemAllocNodeGetParams(node: Handle, parameters: Out<AllocParameters>) {
        let state = state::lock()?;
        let Some(Node::Alloc { gpu, bytes, address }) = state.nodes.get(&node) else {
            return Err(Status::InvalidValue);
        };
        parameters.set(AllocParameters {
            kind: 1,
            handle_types: 0,
            location_type: ON_DEVICE,
            location: Device::of(*gpu).ordinal(),
            windows: std::ptr::null(),
            rest: [0; 8],
            access: std::ptr::null(),
            accesses: 0,
            bytes: *bytes as usize,
            address: *address,
        })
    }

    fn cuGraphChildGraphNodeGetGraph(node: Handle, graph: Out<Handle>) {
        match state::lock()?.nodes.get(&node) {
            Some(Node::Child(child)) => graph.set(*child),
            _ => Err(Status::InvalidValue),
        }
    }

    fn cuDeviceGetGraphMemAttribute(device: Device, attribute: c_int, value: Out<u64>) {
        value.check()?;
        let gpu = gpu(device)?;
        let mut state = state::lock()?;
        let kept = state.kept_for_graphs.entry(gpu).or_default();
        value.set(match attribute {
            0 => kept.used,
            1 => kept.used_high,
            2 => kept.reserved,
            3 => kept.reserved_high,
            _ => return Err(Status::InvalidValue),
        })
    }

    fn cuDeviceGraphMemTrim(device: Device) {
        let gpu = gpu(device)?;
        state::lock()?.trim_graphs(gpu)
    }
}
