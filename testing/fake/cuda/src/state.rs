//! State of this process: contexts, memory, streams, events.
//!
//! One lock protects it; nothing waits while holding it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::abi::CuResult;
use crate::allocation::Allocation;
use crate::array::Array;
use crate::bind::Binding;
use crate::capture::Capture;
use crate::context::{Context, Green, Primary};
use crate::context_storage::Stored;
use crate::driver;
use crate::event::Event;
use crate::graph::{Executable, Graph, Node};
use crate::graph_memory::GraphReserve;
use crate::module::{Function, Module};
use crate::pool::Pool;
use crate::share::ImportedMemory;
use crate::status::Status;
use crate::stream::Stream;
use crate::timeline::Timeline;
use crate::user_object::UserObject;
use crate::vmm::{Physical, Reservation};

/// An opaque handle of the caller, which is never dereferenced.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Handle(pub(crate) usize);

impl Handle {
    pub(crate) const NULL: Self = Self(0);
}

/// First handle value; far from small numbers, so that indexes and garbage pointers are not valid
/// handles.
const FIRST_HANDLE: usize = 0x7e55_c0da_0000;

/// First device pointer; each GPU has its own range.
const FIRST_ADDRESS: u64 = 0x7f00_0000_0000;
/// Size of a GPU's address range in bytes.
const ADDRESSES: u64 = 1 << 44;

/// State of the driver in this process.
#[derive(Debug, Default)]
pub(crate) struct State {
    handles: usize,
    /// Next free device address by GPU, relative to the start of its range.
    addresses: HashMap<usize, u64>,
    pub(crate) contexts: HashMap<Handle, Context>,
    /// Addresses of destroyed contexts.
    pub(crate) spare_contexts: Vec<Handle>,
    pub(crate) green: HashMap<Handle, Green>,
    /// Values of libraries, by context and key.
    pub(crate) context_storage: HashMap<(Handle, usize), Stored>,
    pub(crate) primaries: HashMap<usize, Primary>,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) streams: HashMap<Handle, Stream>,
    pub(crate) created_streams: usize,
    pub(crate) events: HashMap<Handle, Event>,
    pub(crate) modules: HashMap<Handle, Module>,
    pub(crate) functions: HashMap<Handle, Function>,
    pub(crate) arrays: HashMap<Handle, Array>,
    pub(crate) pools: HashMap<Handle, Pool>,
    pub(crate) current_pools: HashMap<usize, Handle>,
    pub(crate) physical: HashMap<u64, Physical>,
    pub(crate) reservations: BTreeMap<u64, Reservation>,
    /// Active captures by the graph that each becomes.
    pub(crate) captures: HashMap<Handle, Capture>,
    pub(crate) graphs: HashMap<Handle, Graph>,
    pub(crate) executable_graphs: HashMap<Handle, Executable>,
    /// Executable graphs with mapped memory.
    pub(crate) mapped_graphs: HashSet<Handle>,
    pub(crate) nodes: HashMap<Handle, Node>,
    pub(crate) user_objects: HashMap<Handle, UserObject>,
    pub(crate) graph_reserves: HashMap<usize, GraphReserve>,
    /// References to physical memory besides handles and mappings.
    pub(crate) bindings: Vec<Binding>,
    pub(crate) endpoint_ids: u32,
    pub(crate) endpoints: HashSet<u32>,
    /// Imported memory of other processes, by address.
    pub(crate) opened: HashMap<u64, ImportedMemory>,
    pub(crate) imported_pools: HashSet<Handle>,
    pub(crate) external: HashSet<Handle>,
    pub(crate) timelines: HashMap<usize, Timeline>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Locks the state. Returns an error if the driver is not initialised.
pub(crate) fn lock() -> CuResult<Guard> {
    driver::machine()?;
    let mut guard = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    guard.get_or_insert_with(State::default);
    Ok(Guard(guard))
}

/// The locked state.
pub(crate) struct Guard(MutexGuard<'static, Option<State>>);

impl std::ops::Deref for Guard {
    type Target = State;

    fn deref(&self) -> &State {
        self.0.as_ref().expect("invariant: filled by lock")
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().expect("invariant: filled by lock")
    }
}

impl State {
    /// Returns a new handle.
    pub(crate) fn new_handle(&mut self) -> Handle {
        self.handles += 1;
        Handle(FIRST_HANDLE + self.handles * 64)
    }

    /// Reuses the addresses of a GPU if nothing is allocated there.
    pub(crate) fn reset_addresses(&mut self, gpu: usize) {
        let is_empty = self.allocations.values().all(|allocation| allocation.gpu != gpu);
        if is_empty && self.reservations.is_empty() {
            self.addresses.remove(&gpu);
        }
    }

    /// Reserves unused addresses of a GPU, followed by a gap that exposes overruns.
    pub(crate) fn new_addresses(
        &mut self,
        gpu: usize,
        bytes: u64,
        alignment: u64,
    ) -> CuResult<u64> {
        let start = FIRST_ADDRESS + gpu as u64 * ADDRESSES;
        let next = self.addresses.entry(gpu).or_insert(0);
        let alignment = alignment.max(512);
        let address = (start + *next).next_multiple_of(alignment);
        let end = address.checked_add(bytes).ok_or(Status::OutOfMemory)? - start;
        if end > ADDRESSES {
            return Err(Status::OutOfMemory);
        }
        *next = end + 512;
        Ok(address)
    }
}
