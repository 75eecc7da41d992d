//! Graphs, as far as streams capture them: how long their kernels take together.

use std::ffi::{c_char, c_ulonglong};
use std::time::Duration;

use crate::abi::{Answer, Out, export};
use crate::state::{self, Handle};
use crate::status::Status;
use crate::timeline::Engine;

/// A graph, or an executable one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Graph {
    pub(crate) kernels: Duration,
}

fn instantiate(out: Out<Handle>, graph: Handle) -> Answer {
    out.check()?;
    let mut state = state::lock()?;
    let graph = *state.graphs.get(&graph).ok_or(Status::InvalidHandle)?;
    let handle = state.new_handle();
    state.executable_graphs.insert(handle, graph);
    out.set(handle)
}

export! {
    fn cuGraphInstantiate(
        out: Out<Handle>, graph: Handle, node: Out<Handle>, log: Out<c_char>, length: usize,
    ) {
        let _ = (node, log, length);
        instantiate(out, graph)
    }

    fn cuGraphInstantiate_v2(
        out: Out<Handle>, graph: Handle, node: Out<Handle>, log: Out<c_char>, length: usize,
    ) {
        let _ = (node, log, length);
        instantiate(out, graph)
    }

    fn cuGraphInstantiateWithFlags(out: Out<Handle>, graph: Handle, flags: c_ulonglong) {
        let _ = flags;
        instantiate(out, graph)
    }

    fn cuGraphLaunch(graph: Handle, on: Handle) {
        let mut state = state::lock()?;
        let length = state.executable_graphs.get(&graph).ok_or(Status::InvalidHandle)?.kernels;
        state.queue(on, Engine::Kernels, length).map(drop)
    }

    fn cuGraphDestroy(graph: Handle) {
        state::lock()?.graphs.remove(&graph).map(drop).ok_or(Status::InvalidHandle)
    }

    fn cuGraphExecDestroy(graph: Handle) {
        state::lock()?.executable_graphs.remove(&graph).map(drop).ok_or(Status::InvalidHandle)
    }
}
