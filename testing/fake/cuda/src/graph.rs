//! Graphs: the total time of their captured kernels, and their memory nodes.

use std::ffi::{c_char, c_ulonglong};
use std::time::Duration;

use crate::abi::{CuResult, OutPtr, export};
use crate::graph_memory::GraphMemory;
use crate::state::{self, Handle};
use crate::status::Status;
use crate::timeline::Engine;

/// A graph.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    pub(crate) kernels: Duration,
    pub(crate) nodes: Vec<Handle>,
}

/// An executable graph.
#[derive(Debug)]
pub(crate) struct Executable {
    kernels: Duration,
    pub(crate) memory: GraphMemory,
}

fn instantiate(out: OutPtr<Handle>, graph: Handle) -> CuResult {
    out.check()?;
    let mut state = state::lock()?;
    let kernels = state.graphs.get(&graph).ok_or(Status::InvalidHandle)?.kernels;
    let memory = state.memory_of_graph(graph)?;
    let handle = state.new_handle();
    state.executable_graphs.insert(handle, Executable { kernels, memory });
    out.set(handle)
}

fn update(executable: Handle, graph: Handle) -> CuResult {
    let mut state = state::lock()?;
    let kernels = state.graphs.get(&graph).ok_or(Status::InvalidHandle)?.kernels;
    let memory = state.memory_of_graph(graph)?;
    let known = state.executable_graphs.get_mut(&executable).ok_or(Status::InvalidHandle)?;
    // The memory layout is fixed at instantiation.
    if memory != known.memory {
        return Err(Status::NotSupported);
    }
    known.kernels = kernels;
    Ok(())
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

    fn cuGraphLaunch(graph: Handle, on: Handle) {
        let mut state = state::lock()?;
        let executable = state.executable_graphs.get(&graph).ok_or(Status::InvalidHandle)?;
        let (length, memory) = (executable.kernels, executable.memory.clone());
        state.map_graph(graph, &memory)?;
        state.charge_graph(graph, &memory)?;
        state.queue(on, Engine::Kernels, length).map(drop)
    }

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

    fn cuGraphDestroy(graph: Handle) {
        state::lock()?.graphs.remove(&graph).map(drop).ok_or(Status::InvalidHandle)
    }

    fn cuGraphExecDestroy(graph: Handle) {
        let mut state = state::lock()?;
        let executable = state.executable_graphs.remove(&graph).ok_or(Status::InvalidHandle)?;
        state.unmap_graph(graph, &executable.memory);
        Ok(())
    }
}
