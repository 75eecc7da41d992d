//! Objects of the program that graphs keep: the driver calls their destructor when nothing refers
//! to them.

use std::ffi::{c_uint, c_void};

use crate::abi::{CuResult, OutPtr, export};
use crate::state::{self, Handle, State};
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

    /// Removes references; returns the objects that have none left, for [`destroy`].
    #[must_use]
    pub(crate) fn release_objects(&mut self, objects: &[(Handle, c_uint)]) -> Vec<UserObject> {
        let mut unused = Vec::new();
        for (handle, count) in objects {
            if let Some(object) = self.user_objects.get_mut(handle) {
                object.references = object.references.saturating_sub(*count);
                if object.references == 0 {
                    unused.extend(self.user_objects.remove(handle));
                }
            }
        }
        unused
    }
}

/// Calls the destructors of objects. The state must not be locked: they are the program's code.
pub(crate) fn destroy(objects: Vec<UserObject>) {
    objects.into_iter().for_each(|object| (object.destroy)(object.data as *mut c_void));
}

fn check(object: Handle, count: c_uint) -> CuResult {
    if count == 0 {
        return Err(Status::InvalidValue);
    }
    state::lock()?.user_objects.get(&object).map(drop).ok_or(Status::InvalidValue)
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
        check(object, count)?;
        state::lock()?.retain_objects(&[(object, count)]);
        Ok(())
    }

    fn cuUserObjectRelease(object: Handle, count: c_uint) {
        check(object, count)?;
        let unused = state::lock()?.release_objects(&[(object, count)]);
        self::destroy(unused);
        Ok(())
    }

    fn cuGraphRetainUserObject(graph: Handle, object: Handle, count: c_uint, flags: c_uint) {
        /// `CU_GRAPH_USER_OBJECT_MOVE`: the caller's references become the graph's.
        const MOVE: c_uint = 1;
        check(object, count)?;
        let mut state = state::lock()?;
        state.graphs.get_mut(&graph).ok_or(Status::InvalidValue)?.objects.push((object, count));
        if flags & MOVE == 0 {
            state.retain_objects(&[(object, count)]);
        }
        Ok(())
    }

    fn cuGraphReleaseUserObject(graph: Handle, object: Handle, count: c_uint) {
        check(object, count)?;
        let mut state = state::lock()?;
        let known = &mut state.graphs.get_mut(&graph).ok_or(Status::InvalidValue)?.objects;
        let at = known.iter().position(|known| *known == (object, count));
        known.remove(at.ok_or(Status::InvalidValue)?);
        let unused = state.release_objects(&[(object, count)]);
        drop(state);
        self::destroy(unused);
        Ok(())
    }
}
