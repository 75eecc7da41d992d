//! Waiting to be told to stop.

use crate::report::Failure;

/// SIGTERM and SIGINT, blocked: as process 1 of a container it would not get them otherwise.
#[derive(Debug)]
pub(crate) struct Signals(libc::sigset_t);

/// Blocks the signals. Call it before anything else, so that threads of a driver inherit it.
pub(crate) fn block() -> Result<Signals, Failure> {
    // SAFETY: `sigset_t` is plain data that `sigemptyset` initialises.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a set of ours.
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
    /// Waits for one of them.
    pub(crate) fn wait(&self) {
        let mut signal = 0;
        // SAFETY: both point to values of ours.
        unsafe { libc::sigwait(&self.0, &mut signal) };
    }
}
