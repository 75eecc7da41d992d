//! What this process has made: contexts, memory, streams, events.
//!
//! One lock over all of it; nothing waits while it is held.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::abi::Answer;
use crate::allocation::Allocation;
use crate::array::Array;
use crate::bind::Binding;
use crate::context::{Context, Green, Primary};
use crate::driver;
use crate::event::Event;
use crate::graph::{Executable, Graph};
use crate::graph_memory::{Kept, Node};
use crate::module::{Function, Module};
use crate::pool::Pool;
use crate::share::Opened;
use crate::status::Status;
use crate::stream::Stream;
use crate::timeline::Timeline;
use crate::vmm::{Physical, Reservation};

/// A handle as the caller has it: opaque, never dereferenced.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Handle(pub(crate) usize);

impl Handle {
    pub(crate) const NULL: Self = Self(0);
}

/// Far from small numbers, so that an index or a garbage pointer is not taken for a handle.
const FIRST_HANDLE: usize = 0x7e55_c0da_0000;

/// Where device pointers begin; every GPU has a range of its own.
const FIRST_ADDRESS: u64 = 0x7f00_0000_0000;
/// Bytes of addresses that a GPU has.
const ADDRESSES: u64 = 1 << 44;

/// Everything.
#[derive(Debug, Default)]
pub(crate) struct State {
    handles: usize,
    /// By GPU: the next free device address, from the start of its range.
    addresses: HashMap<usize, u64>,
    pub(crate) contexts: HashMap<Handle, Context>,
    pub(crate) green: HashMap<Handle, Green>,
    pub(crate) primaries: HashMap<usize, Primary>,
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) streams: HashMap<Handle, Stream>,
    pub(crate) events: HashMap<Handle, Event>,
    pub(crate) modules: HashMap<Handle, Module>,
    pub(crate) functions: HashMap<Handle, Function>,
    pub(crate) arrays: HashMap<Handle, Array>,
    pub(crate) pools: HashMap<Handle, Pool>,
    pub(crate) current_pools: HashMap<usize, Handle>,
    pub(crate) physical: HashMap<u64, Physical>,
    pub(crate) reservations: BTreeMap<u64, Reservation>,
    pub(crate) graphs: HashMap<Handle, Graph>,
    pub(crate) executable_graphs: HashMap<Handle, Executable>,
    /// Executable graphs that have their memory.
    pub(crate) mapped_graphs: HashSet<Handle>,
    pub(crate) nodes: HashMap<Handle, Node>,
    pub(crate) kept_for_graphs: HashMap<usize, Kept>,
    /// What keeps physical memory beside handles and mappings.
    pub(crate) bindings: Vec<Binding>,
    pub(crate) endpoint_ids: u32,
    pub(crate) endpoints: HashSet<u32>,
    /// By address: memory of other processes that is open here.
    pub(crate) opened: HashMap<u64, Opened>,
    pub(crate) imported_pools: HashSet<Handle>,
    pub(crate) external: HashSet<Handle>,
    pub(crate) timelines: HashMap<usize, Timeline>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// The state, locked. Fails where the driver is not initialised.
pub(crate) fn lock() -> Answer<Guard> {
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
    /// A handle that was never used.
    pub(crate) fn new_handle(&mut self) -> Handle {
        self.handles += 1;
        Handle(FIRST_HANDLE + self.handles * 64)
    }

    /// Addresses are given out again when nothing is left on a GPU.
    pub(crate) fn begin_addresses_anew(&mut self, gpu: usize) {
        let is_empty = self.allocations.values().all(|allocation| allocation.gpu != gpu);
        if is_empty && self.reservations.is_empty() {
            self.addresses.remove(&gpu);
        }
    }

    /// Addresses of a GPU that nobody uses; with a gap behind them, so that overruns are seen.
    pub(crate) fn new_addresses(&mut self, gpu: usize, bytes: u64, alignment: u64) -> Answer<u64> {
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
