//! Physical memory that is bound to an object without memory of its own: multicast objects, logical
//! endpoints, sparse arrays.

use core::ffi::c_uint;

/// One binding. The memory lives until it is unbound or the object is destroyed, also without
/// handles and mappings.
#[derive(Clone, Copy, Default)]
pub(crate) struct Binding {
    /// Object that the memory is bound to.
    pub(crate) owner: Owner,
    /// Offset in the object; of arrays, a number that identifies the place.
    pub(crate) at: u64,
    /// Of multicast objects and endpoints: the GPU of the memory, if the call named one.
    pub(crate) gpu: Option<u32>,
    /// Number of the memory.
    pub(crate) memory: u64,
}

/// Object that memory can be bound to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Owner {
    #[default]
    Nothing,
    /// A multicast object, by the number of its handle.
    Multicast(u64),
    Endpoint(c_uint),
    /// An array or a mipmapped array.
    Array(u64),
}
