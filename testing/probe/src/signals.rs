//! Waiting for a termination signal.

use crate::report::Failure;

/// SIGTERM and SIGINT, blocked: the kernel does not deliver them to process 1 of a container by
/// default.
#[derive(Debug)]
pub(crate) struct Signals(libc::sigset_t);

/// Blocks the signals. Must be called first, so that threads of a driver inherit the mask.
pub(crate) fn block() -> Result<Signals, Failure> {
    // SAFETY: `sigset_t` is plain data that `sigemptyset` initialises.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a local variable.
    let code = unsafe {
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTERM);
        libc::sigaddset(&mut set, libc::SIGINT);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut())
    };
    if code != 0 {
        let name = std::io::Error::from_raw_os_error(code).to_string();
        return Err(Failure { call: "pthread_sigmask".to_owned(), code, name });
    }
    Ok(Signals(set))
}

impl Signals {
    /// Waits for one of the signals.
    pub(crate) fn wait(&self) {
        let mut signal = 0;
        // SAFETY: both pointers are to valid values.
        unsafe { libc::sigwait(&self.0, &mut signal) };
    }
}
