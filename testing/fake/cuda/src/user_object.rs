//! Objects of the program that graphs keep: the driver calls their destructor when nothing refers
//! to them.

use std::ffi::{c_uint, c_void};

use crate::abi::{CuResult, OutPtr, export};
use crate::state::{self, Guard, Handle, State};
use crate::status::Status;

/// A `CUuserObject`.
#[derive(Debug)]
pub(crate) struct UserObject {
    data: usize,
    destroy: extern "C" fn(*mut c_void),
    references: c_uint,
}

impl State {
    /// Adds references to objects.
    pub(crate) fn retain_objects(&mut self, objects: &[(Handle, c_uint)]) {
        for (handle, count) in objects {
            if let Some(object) = self.user_objects.get_mut(handle) {
                object.references += count;
            }
        }
    }
}

/// Removes references, and calls the destructors of objects that have none left: they are the
/// program's code, and may call the driver, so the state is unlocked before.
pub(crate) fn release(mut state: Guard, objects: &[(Handle, c_uint)]) {
    let mut unused = Vec::new();
    for (handle, count) in objects {
        if let Some(object) = state.user_objects.get_mut(handle) {
            object.references = object.references.saturating_sub(*count);
            if object.references == 0 {
                unused.extend(state.user_objects.remove(handle));
            }
        }
    }
    drop(state);
    unused.into_iter().for_each(|object| (object.destroy)(object.data as *mut c_void));
}

/// Locks the state and checks that an object exists.
fn lock_with(object: Handle, count: c_uint) -> CuResult<Guard> {
    let state = state::lock()?;
    if count == 0 || !state.user_objects.contains_key(&object) {
        return Err(Status::InvalidValue);
    }
    Ok(state)
}

export! {
    fn cuUserObjectCreate(
        out: OutPtr<Handle>,
        data: *mut c_void,
        destroy: Option<extern "C" fn(*mut c_void)>,
        references: c_uint,
        flags: c_uint,
    ) {
        /// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which is required.
        const NO_DESTRUCTOR_SYNC: c_uint = 1;
        out.check()?;
        let destroy = destroy.ok_or(Status::InvalidValue)?;
        if references == 0 || flags != NO_DESTRUCTOR_SYNC {
            return Err(Status::InvalidValue);
        }
        let mut state = state::lock()?;
        let handle = state.new_handle();
        state.user_objects.insert(handle, UserObject { data: data as usize, destroy, references });
        out.set(handle)
    }

    fn cuUserObjectRetain(object: Handle, count: c_uint) {
        lock_with(object, count)?.retain_objects(&[(object, count)]);
        Ok(())
    }

    fn cuUserObjectRelease(object: Handle, count: c_uint) {
        release(lock_with(object, count)?, &[(object, count)]);
        Ok(())
    }

    fn cuGraphRetainUserObject(graph: Handle, object: Handle, count: c_uint, flags: c_uint) {
        /// `CU_GRAPH_USER_OBJECT_MOVE`: the caller's references become the graph's.
        const MOVE: c_uint = 1;
        let mut state = lock_with(object, count)?;
        state.graphs.get_mut(&graph).ok_or(Status::InvalidValue)?.objects.push((object, count));
        if flags & MOVE == 0 {
            state.retain_objects(&[(object, count)]);
        }
        Ok(())
    }

    fn cuGraphReleaseUserObject(graph: Handle, object: Handle, count: c_uint) {
        let mut state = lock_with(object, count)?;
        let known = &mut state.graphs.get_mut(&graph).ok_or(Status::InvalidValue)?.objects;
        let at = known.iter().position(|known| *known == (object, count));
        known.remove(at.ok_or(Status::InvalidValue)?);
        release(state, &[(object, count)]);
        Ok(())
    }
}
