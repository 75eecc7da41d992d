//! Memory that this process holds on a GPU.

use crate::abi::Answer;
use crate::driver;
use crate::host;
use crate::mps;
use crate::state::{Handle, State};
use crate::status::Status;

/// The driver hands memory out in such pieces.
const GRANULE: u64 = 512;

/// A piece of memory with a device pointer.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) gpu: usize,
    pub(crate) context: Handle,
    /// As asked for.
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
}

/// Where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// On the GPU.
    Device,
    /// On the GPU, from a pool, which has taken the memory.
    Pool(Handle),
    /// In memory of the host, from a pool.
    HostPool(Handle),
    /// On the GPU, from an executable graph, which has taken the memory.
    Graph(Handle),
    /// From a managed pool, which may be said to be on the host.
    ManagedPool { pool: Handle, on_host: bool },
    /// On the GPU, where another process has taken it.
    Imported,
    /// The same from a pool: it is no context's.
    ImportedFromPool,
    /// In host memory that is known to the GPU; the host address is the device pointer.
    Managed,
}

/// Takes bytes of a GPU from the world.
pub(crate) fn charge(gpu: usize, bytes: u64) -> Answer {
    let machine = driver::machine()?;
    let board = &machine.world().gpus[gpu];
    if machine.is_lost(board) {
        return Err(Status::DeviceUnavailable);
    }
    let whole = rounded(bytes).ok_or(Status::OutOfMemory)?;
    let limit = mps::on_gpu_of(machine, gpu).and_then(mps::Joined::memory_bytes);
    if limit.is_some_and(|limit| machine.usage().own(gpu).saturating_add(whole) > limit) {
        return Err(Status::OutOfMemory);
    }
    machine.usage().take(gpu, whole, machine.capacity(board)).map_err(|_| Status::OutOfMemory)
}

/// Gives bytes that [`charge`] took back to the world.
pub(crate) fn discharge(gpu: usize, bytes: u64) -> Answer {
    driver::machine()?.usage().give_back(gpu, rounded(bytes).unwrap_or(0));
    Ok(())
}

/// Bytes in whole granules.
pub(crate) fn rounded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(GRANULE)
}

impl State {
    /// Takes memory of a GPU; answers its address.
    pub(crate) fn allocate(
        &mut self,
        gpu: usize,
        context: Handle,
        bytes: u64,
        kind: Kind,
    ) -> Answer<u64> {
        if bytes == 0 {
            return Err(Status::InvalidValue);
        }
        let address = match kind {
            Kind::Managed => host::map(bytes)?,
            Kind::Imported
            | Kind::ImportedFromPool
            | Kind::Graph(_)
            | Kind::HostPool(_)
            | Kind::ManagedPool { .. }
            | Kind::Pool(_) => self.new_addresses(gpu, bytes, GRANULE)?,
            Kind::Device => {
                self.charge(gpu, bytes)?;
                self.new_addresses(gpu, bytes, GRANULE)
                    .inspect_err(|_| discharge(gpu, bytes).unwrap_or_default())?
            }
        };
        self.allocations.insert(address, Allocation { gpu, context, bytes, kind });
        Ok(address)
    }

    /// Gives memory back.
    pub(crate) fn free(&mut self, address: u64) -> Answer {
        let allocation = self.allocations.remove(&address).ok_or(Status::InvalidValue)?;
        match allocation.kind {
            Kind::Managed => host::unmap(address, allocation.bytes),
            Kind::Graph(graph) => self.return_to_graph(graph, allocation.gpu, allocation.bytes),
            Kind::Imported | Kind::ImportedFromPool => {}
            Kind::Device => discharge(allocation.gpu, allocation.bytes)?,
            Kind::Pool(pool) | Kind::HostPool(pool) | Kind::ManagedPool { pool, .. } => {
                self.return_to_pool(pool, rounded(allocation.bytes).unwrap_or(0))?;
            }
        }
        Ok(())
    }

    /// Gives back all memory of a context; that of pools is no context's.
    pub(crate) fn free_all_of(&mut self, context: Handle) -> Answer {
        let is_pools = |kind| {
            matches!(
                kind,
                Kind::Pool(_)
                    | Kind::HostPool(_)
                    | Kind::ManagedPool { .. }
                    | Kind::ImportedFromPool
                    | Kind::Graph(_)
            )
        };
        let of_context = self
            .allocations
            .iter()
            .filter(|(_, allocation)| allocation.context == context && !is_pools(allocation.kind));
        for address in of_context.map(|(address, _)| *address).collect::<Vec<_>>() {
            self.free(address)?;
        }
        self.destroy_arrays_of(context)
    }

    /// The memory that an address lies in, and where that begins.
    pub(crate) fn allocation_at(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (start, allocation) = self.allocations.range(..=address).next_back()?;
        (address - start < allocation.bytes).then_some((*start, allocation))
    }
}
