//! Functions that are handed out and that nobody here has heard of: those of a driver newer than
//! the table of symbols. They pass, since programs need them, and are counted, so that somebody
//! hears of them.

use core::ffi::CStr;

use tessera_intercept_symbols::is_known;

use crate::root::with_state;

/// Counts a function that a program was handed out, if no known release has a function of that
/// name.
pub(crate) fn note(name: &CStr) {
    if !is_known(name.to_bytes()) {
        count();
    }
}

/// Counts a function that a program was handed out and that has no hook.
pub(crate) fn count() {
    with_state(|state| {
        if let Some(share) = state.shares(0).first() {
            share.count_unknown();
        }
    });
}
