//! Memory that this process allocates on a GPU.

use crate::abi::CuResult;
use crate::driver;
use crate::host;
use crate::mps;
use crate::state::{Handle, State};
use crate::status::Status;

/// Granularity of the driver's allocations in bytes.
const GRANULE: u64 = 512;

/// An allocation with a device pointer.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) gpu: usize,
    pub(crate) context: Handle,
    /// Requested size.
    pub(crate) bytes: u64,
    pub(crate) kind: AllocationKind,
}

/// Location and owner of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AllocationKind {
    /// GPU memory.
    Device,
    /// GPU memory of a pool, which is charged for it.
    Pool(Handle),
    /// Host memory of a pool.
    HostPool(Handle),
    /// GPU memory of an executable graph, which is charged for it.
    Graph(Handle),
    /// Memory of a managed pool, whose preferred location may be the host.
    ManagedPool { pool: Handle, on_host: bool },
    /// A variable of a module, which is charged for it.
    Variable,
    /// GPU memory that another process is charged for.
    Imported,
    /// GPU memory of another process's pool; it belongs to no context.
    ImportedFromPool,
    /// Managed memory. It is host memory whose address is also the device pointer.
    Managed,
}

/// Charges bytes of a GPU to this process.
pub(crate) fn charge(gpu: usize, bytes: u64) -> CuResult {
    let machine = driver::machine()?;
    let board = &machine.world().gpus[gpu];
    if machine.is_lost(board) {
        return Err(Status::DeviceUnavailable);
    }
    let bytes = rounded(bytes).ok_or(Status::OutOfMemory)?;
    let limit = mps::client_on_index(machine, gpu).and_then(mps::MpsClient::memory_limit);
    if limit.is_some_and(|limit| machine.usage().own(gpu).saturating_add(bytes) > limit) {
        return Err(Status::OutOfMemory);
    }
    machine.usage().charge(gpu, bytes, machine.capacity(board)).map_err(|_| Status::OutOfMemory)
}

/// Refunds bytes of [`charge`].
pub(crate) fn refund(gpu: usize, bytes: u64) -> CuResult {
    driver::machine()?.usage().refund(gpu, rounded(bytes).unwrap_or(0));
    Ok(())
}

/// Rounds bytes up to the granularity.
pub(crate) fn rounded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(GRANULE)
}

impl State {
    /// Allocates memory of a GPU and returns its address.
    pub(crate) fn allocate(
        &mut self,
        gpu: usize,
        context: Handle,
        bytes: u64,
        kind: AllocationKind,
    ) -> CuResult<u64> {
        if bytes == 0 {
            return Err(Status::InvalidValue);
        }
        let address = match kind {
            AllocationKind::Managed => host::map(bytes)?,
            AllocationKind::Imported
            | AllocationKind::ImportedFromPool
            | AllocationKind::Variable
            | AllocationKind::Graph(_)
            | AllocationKind::HostPool(_)
            | AllocationKind::ManagedPool { .. }
            | AllocationKind::Pool(_) => self.new_addresses(gpu, bytes, GRANULE)?,
            AllocationKind::Device => {
                self.charge(gpu, bytes)?;
                self.new_addresses(gpu, bytes, GRANULE)
                    .inspect_err(|_| refund(gpu, bytes).unwrap_or_default())?
            }
        };
        self.allocations.insert(address, Allocation { gpu, context, bytes, kind });
        Ok(address)
    }

    /// Frees an allocation.
    pub(crate) fn free(&mut self, address: u64) -> CuResult {
        let allocation = self.allocations.remove(&address).ok_or(Status::InvalidValue)?;
        match allocation.kind {
            AllocationKind::Managed => host::unmap(address, allocation.bytes),
            AllocationKind::Graph(graph) => {
                self.return_to_graph(graph, allocation.gpu, allocation.bytes)
            }
            AllocationKind::Imported => self.close_imported(address)?,
            AllocationKind::ImportedFromPool | AllocationKind::Variable => {}
            AllocationKind::Device => {
                driver::machine()?.usage().freed(address);
                refund(allocation.gpu, allocation.bytes)?;
            }
            AllocationKind::Pool(pool)
            | AllocationKind::HostPool(pool)
            | AllocationKind::ManagedPool { pool, .. } => {
                self.return_to_pool(pool, rounded(allocation.bytes).unwrap_or(0))?;
            }
        }
        Ok(())
    }

    /// Frees all memory of a context; memory of pools belongs to no context.
    pub(crate) fn free_all_of(&mut self, context: Handle) -> CuResult {
        let is_of_pool = |kind| {
            matches!(
                kind,
                AllocationKind::Pool(_)
                    | AllocationKind::HostPool(_)
                    | AllocationKind::ManagedPool { .. }
                    | AllocationKind::ImportedFromPool
                    | AllocationKind::Graph(_)
            )
        };
        let of_context = self.allocations.iter().filter(|(_, allocation)| {
            allocation.context == context && !is_of_pool(allocation.kind)
        });
        for address in of_context.map(|(address, _)| *address).collect::<Vec<_>>() {
            self.free(address)?;
        }
        self.destroy_arrays_of(context)
    }

    /// Returns the allocation that contains an address, and its start.
    pub(crate) fn allocation_at(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (start, allocation) = self.allocations.range(..=address).next_back()?;
        (address - start < allocation.bytes).then_some((*start, allocation))
    }
}
