//! Functions of a driver that is newer than the symbol table. Programs get them, because they need
//! them, and they are counted, so that operators see it.

use core::ffi::CStr;

use tessera_intercept_symbols::is_known;

use crate::state::with_state;

/// Counts a function that a program gets, if no known release has a function of that name.
pub(crate) fn note(name: &CStr) {
    if !is_known(name.to_bytes()) {
        count();
    }
}

/// Counts a function that a program gets and that has no hook.
pub(crate) fn count() {
    with_state(|state| {
        if let Some(share) = state.shares(0).first() {
            share.count_unknown();
        }
    });
}
