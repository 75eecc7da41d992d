//! Graphs: nodes with their order, and executable graphs. A graph takes the sum of its nodes'
//! times.

use std::collections::HashSet;
use std::ffi::{c_char, c_uint, c_ulonglong, c_void};
use std::time::Duration;

use crate::abi::{CuResult, InPtr, OutPtr, export};
use crate::graph_memory::GraphMemory;
use crate::state::{self, Handle, State};
use crate::status::Status;
use crate::timeline::{self, Engine, Fill};
use crate::user_object;

/// A graph.
#[derive(Debug, Default, Clone)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Handle>,
    /// User objects with the references that the graph has.
    pub(crate) objects: Vec<(Handle, c_uint)>,
}

/// A node of a graph; it runs after others.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) kind: NodeKind,
    pub(crate) after: Vec<Handle>,
}

/// Kind of a node, with its parameters.
#[derive(Debug, Clone, Copy)]
pub(crate) enum NodeKind {
    Empty,
    Work(Engine, Duration),
    Host(HostFunction),
    WaitEvent,
    RecordEvent(Handle),
    Alloc { gpu: usize, bytes: u64, address: u64 },
    Free { address: u64 },
    Child(Handle),
}

impl NodeKind {
    /// `CUgraphNodeType`. A memset is work on the multiprocessors here, and so a kernel.
    fn number(self) -> c_uint {
        match self {
            Self::Work(Engine::Kernels(_), _) => 0,
            Self::Work(Engine::Copies, _) => 1,
            Self::Host(_) => 3,
            Self::Child(_) => 4,
            Self::Empty => 5,
            Self::WaitEvent => 6,
            Self::RecordEvent(_) => 7,
            Self::Alloc { .. } => 10,
            Self::Free { .. } => 11,
        }
    }
}

/// A function of the program that the driver calls on a thread of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostFunction {
    pub(crate) function: extern "C" fn(*mut c_void),
    pub(crate) data: usize,
}

impl HostFunction {
    /// Calls it at a time.
    pub(crate) fn call_at(self, time: u64) {
        std::thread::spawn(move || {
            timeline::wait_until(time);
            (self.function)(self.data as *mut c_void);
        });
    }
}

/// An executable graph.
#[derive(Debug, Clone)]
pub(crate) struct Executable {
    work: Work,
    pub(crate) memory: GraphMemory,
    objects: Vec<(Handle, c_uint)>,
}

/// Work of a graph besides its memory.
#[derive(Debug, Clone, Default)]
struct Work {
    length: Duration,
    functions: Vec<HostFunction>,
    events: Vec<Handle>,
}

/// Reads an array of handles.
pub(crate) fn handles(array: *const Handle, count: usize) -> CuResult<Vec<Handle>> {
    let array = InPtr::<Handle>::from(array.cast_mut().cast());
    (0..count).map(|at| array.get_at(at)).collect()
}

impl State {
    /// Adds a node to a graph.
    ///
    /// # Errors
    /// One of the nodes before it is not of this graph.
    pub(crate) fn add_node(&mut self, graph: Handle, node: Node) -> CuResult<Handle> {
        let handle = self.new_handle();
        let nodes = &mut self.graphs.get_mut(&graph).ok_or(Status::InvalidHandle)?.nodes;
        if !node.after.iter().all(|before| nodes.contains(before)) {
            return Err(Status::InvalidValue);
        }
        nodes.push(handle);
        self.nodes.insert(handle, node);
        Ok(handle)
    }

    /// Returns these nodes and all that run before them.
    pub(crate) fn with_all_before(&self, nodes: &[Handle]) -> HashSet<Handle> {
        let (mut found, mut next) = (HashSet::new(), nodes.to_vec());
        while let Some(node) = next.pop() {
            if found.insert(node) {
                next.extend(self.nodes.get(&node).into_iter().flat_map(|node| &node.after));
            }
        }
        found
    }

    /// Returns the kinds of a graph's nodes.
    pub(crate) fn kinds_of(&self, graph: Handle) -> CuResult<impl Iterator<Item = NodeKind>> {
        let nodes = &self.graphs.get(&graph).ok_or(Status::InvalidHandle)?.nodes;
        Ok(nodes.iter().filter_map(|node| self.nodes.get(node)).map(|node| node.kind))
    }

    fn work_of(&self, graph: Handle, work: &mut Work) -> CuResult {
        for kind in self.kinds_of(graph)? {
            match kind {
                NodeKind::Work(_, length) => work.length += length,
                NodeKind::Host(function) => work.functions.push(function),
                NodeKind::RecordEvent(event) => work.events.push(event),
                NodeKind::Child(child) => self.work_of(child, work)?,
                NodeKind::Empty
                | NodeKind::WaitEvent
                | NodeKind::Alloc { .. }
                | NodeKind::Free { .. } => {}
            }
        }
        Ok(())
    }

    fn executable(&self, graph: Handle) -> CuResult<Executable> {
        let mut work = Work::default();
        self.work_of(graph, &mut work)?;
        let memory = self.memory_of_graph(graph)?;
        let objects = self.graphs.get(&graph).ok_or(Status::InvalidHandle)?.objects.clone();
        Ok(Executable { work, memory, objects })
    }
}

fn instantiate(out: OutPtr<Handle>, graph: Handle) -> CuResult {
    out.check()?;
    let mut state = state::lock()?;
    let executable = state.executable(graph)?;
    state.retain_objects(&executable.objects);
    let handle = state.new_handle();
    state.executable_graphs.insert(handle, executable);
    out.set(handle)
}

fn update(executable: Handle, graph: Handle) -> CuResult {
    let mut state = state::lock()?;
    let new = state.executable(graph)?;
    let known = state.executable_graphs.get_mut(&executable).ok_or(Status::InvalidHandle)?;
    // The memory layout is fixed at instantiation.
    if new.memory != known.memory {
        return Err(Status::NotSupported);
    }
    let old = std::mem::replace(&mut known.objects, new.objects.clone());
    known.work = new.work;
    state.retain_objects(&new.objects);
    user_object::release(state, &old);
    Ok(())
}

fn launch(graph: Handle, on: Handle) -> CuResult {
    let mut state = state::lock()?;
    let Executable { work, memory, .. } =
        state.executable_graphs.get(&graph).ok_or(Status::InvalidHandle)?.clone();
    state.map_graph(graph, &memory)?;
    state.charge_graph(graph, &memory)?;
    let end = state.queue(on, Engine::Kernels(Fill::ALL), work.length)?;
    work.events.into_iter().for_each(|event| state.record_at(event, end));
    work.functions.into_iter().for_each(|function| function.call_at(end));
    Ok(())
}

/// Makes nodes of a graph run after others.
fn add_dependencies(
    graph: Handle,
    from: *const Handle,
    to: *const Handle,
    count: usize,
) -> CuResult {
    let (from, to) = (handles(from, count)?, handles(to, count)?);
    let mut state = state::lock()?;
    let nodes = &state.graphs.get(&graph).ok_or(Status::InvalidHandle)?.nodes;
    if !from.iter().chain(&to).all(|node| nodes.contains(node)) {
        return Err(Status::InvalidValue);
    }
    for (before, node) in from.into_iter().zip(to) {
        if let Some(node) = state.nodes.get_mut(&node) {
            node.after.push(before);
        }
    }
    Ok(())
}

/// Writes handles to an array with room for `count`, if there is one, and their number to `count`.
fn list(all: &[Handle], array: OutPtr<Handle>, count: OutPtr<usize>) -> CuResult {
    count.check()?;
    if array.check().is_ok() {
        let room = InPtr::<usize>::from(count.pointer().cast()).get()?;
        for (at, node) in all.iter().take(room).enumerate() {
            array.at(at).set(*node)?;
        }
    }
    count.set(all.len())
}

export! {
    fn cuGraphInstantiate(
        out: OutPtr<Handle>, graph: Handle, node: OutPtr<Handle>, log: OutPtr<c_char>, length: usize,
    ) {
        let _ = (node, log, length);
        instantiate(out, graph)
    }

    fn cuGraphInstantiate_v2(
        out: OutPtr<Handle>, graph: Handle, node: OutPtr<Handle>, log: OutPtr<c_char>, length: usize,
    ) {
        let _ = (node, log, length);
        instantiate(out, graph)
    }

    fn cuGraphInstantiateWithFlags(out: OutPtr<Handle>, graph: Handle, flags: c_ulonglong) {
        let _ = flags;
        instantiate(out, graph)
    }

    fn cuGraphLaunch(graph: Handle, on: Handle) { launch(graph, on) }

    fn cuGraphUpload(graph: Handle, on: Handle) {
        let mut state = state::lock()?;
        crate::stream::gpu_of(&state, on)?;
        let memory = state.executable_graphs.get(&graph).ok_or(Status::InvalidHandle)?.memory.clone();
        state.map_graph(graph, &memory)
    }

    fn cuGraphInstantiateWithParams(out: OutPtr<Handle>, graph: Handle, parameters: OutPtr<u64>) {
        parameters.check()?;
        instantiate(out, graph)
    }

    fn cuGraphExecUpdate(executable: Handle, graph: Handle, node: OutPtr<Handle>, outcome: OutPtr<u32>) {
        let _ = node;
        let answer = update(executable, graph);
        outcome.set_unless_null(u32::from(answer.is_err()));
        answer
    }

    fn cuGraphExecUpdate_v2(executable: Handle, graph: Handle, outcome: OutPtr<u32>) {
        let answer = update(executable, graph);
        outcome.set_unless_null(u32::from(answer.is_err()));
        answer
    }

    fn cuGraphAddDependencies(graph: Handle, from: *const Handle, to: *const Handle, count: usize) {
        add_dependencies(graph, from, to, count)
    }

    fn cuGraphAddDependencies_v2(
        graph: Handle,
        from: *const Handle,
        to: *const Handle,
        edges: *const c_void,
        count: usize,
    ) {
        let _ = edges;
        add_dependencies(graph, from, to, count)
    }

    fn cuGraphGetNodes(graph: Handle, nodes: OutPtr<Handle>, count: OutPtr<usize>) {
        let state = state::lock()?;
        list(&state.graphs.get(&graph).ok_or(Status::InvalidHandle)?.nodes, nodes, count)
    }

    fn cuGraphGetRootNodes(graph: Handle, nodes: OutPtr<Handle>, count: OutPtr<usize>) {
        let state = state::lock()?;
        let mut all = state.graphs.get(&graph).ok_or(Status::InvalidHandle)?.nodes.clone();
        all.retain(|node| state.nodes.get(node).is_some_and(|node| node.after.is_empty()));
        list(&all, nodes, count)
    }

    fn cuGraphNodeGetDependencies(node: Handle, before: OutPtr<Handle>, count: OutPtr<usize>) {
        let state = state::lock()?;
        list(&state.nodes.get(&node).ok_or(Status::InvalidHandle)?.after, before, count)
    }

    fn cuGraphNodeGetType(node: Handle, kind: OutPtr<c_uint>) {
        kind.set(state::lock()?.nodes.get(&node).ok_or(Status::InvalidHandle)?.kind.number())
    }

    fn cuGraphDestroy(graph: Handle) {
        let mut state = state::lock()?;
        let graph = state.graphs.remove(&graph).ok_or(Status::InvalidHandle)?;
        user_object::release(state, &graph.objects);
        Ok(())
    }

    fn cuGraphExecDestroy(graph: Handle) {
        let mut state = state::lock()?;
        let executable = state.executable_graphs.remove(&graph).ok_or(Status::InvalidHandle)?;
        state.unmap_graph(graph, &executable.memory);
        user_object::release(state, &executable.objects);
        Ok(())
    }
}
