//! What driver, controller and keeper of MPS daemons have in common as programs that run where nobody watches.
//!
//! An operator sets the same flags the same way for each, reads the same log lines, and ends each by the same signals.

pub mod address;
pub mod log;
pub mod signals;
