//! The limit of open files.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit of open files to the hard limit.
///
/// Container runtimes start programs with a soft limit of 1024, for programs that call `select`. A
/// failure is logged: the program works with the lower limit.
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => tracing::debug!(from = limit.current, to = limit.maximum, "raised open files"),
        Err(error) => tracing::warn!(%error, "cannot raise the limit of open files"),
    }
}
