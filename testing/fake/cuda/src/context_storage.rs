//! Values that libraries keep for each context, by keys of their own.

use crate::abi::CuResult;
use crate::context::current;
use crate::state::{self, Handle};
use crate::status::Status;

/// Called with context, key and value when the context is destroyed.
pub(crate) type Destructor = extern "C" fn(Handle, usize, usize);

/// A stored value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored {
    value: usize,
    destructor: Option<Destructor>,
}

/// A destructor with its arguments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Destruction {
    context: Handle,
    key: usize,
    stored: Stored,
}

impl Destruction {
    /// Returns the destruction of a stored value.
    pub(crate) fn of(context: Handle, key: usize, stored: Stored) -> Self {
        Self { context, key, stored }
    }

    /// Calls the destructor, if there is one. It may call the driver.
    pub(crate) fn run(self) {
        if let Some(destructor) = self.stored.destructor {
            destructor(self.context, self.key, self.stored.value);
        }
    }
}

/// Returns the context, or the current one for NULL.
fn chosen(context: Handle) -> CuResult<Handle> {
    if context == Handle::NULL { current().ok_or(Status::InvalidContext) } else { Ok(context) }
}

/// Stores a value.
pub(crate) fn put(
    context: Handle,
    key: usize,
    value: usize,
    destructor: Option<Destructor>,
) -> CuResult {
    let context = chosen(context)?;
    state::lock()?.context_storage.insert((context, key), Stored { value, destructor });
    Ok(())
}

/// Removes a value without calling its destructor.
pub(crate) fn delete(context: Handle, key: usize) -> CuResult {
    let context = chosen(context)?;
    let removed = state::lock()?.context_storage.remove(&(context, key));
    removed.map(drop).ok_or(Status::InvalidHandle)
}

/// Returns a value.
pub(crate) fn get(context: Handle, key: usize) -> CuResult<usize> {
    let context = chosen(context)?;
    let state = state::lock()?;
    state
        .context_storage
        .get(&(context, key))
        .map(|stored| stored.value)
        .ok_or(Status::InvalidHandle)
}
