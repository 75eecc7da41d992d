//! Host's PID of this process, for its slots: requested from the driver's socket after the process
//! has a slot. Nothing depends on the answer.
//!
//! A process asks once. The protocol is `tessera_intercept_abi::host_pid`; the use of the answer is
//! in `docs/adr/0086-host-pids-and-usage-audit.md`.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, Ordering};

use tessera_intercept_abi::host_pid::{LEN, parse};

use crate::sys::{self, Connection, HERE};

const SOCKET: &CStr = c"/dev/tessera/host/pid.sock";

/// Timeout of the request: far more than a running driver takes.
const TIMEOUT_NS: u64 = 200_000_000;

/// No slot needs the PID yet.
const UNWANTED: u32 = 0;
/// The request is due at the next use of the state.
const DUE: u32 = 1;
/// The request was made.
const REQUESTED: u32 = 2;

/// Host's PID of this process. All zeroes is a new one; the kernel gives that to forked children,
/// which are other processes.
#[repr(C)]
pub(crate) struct HostPid {
    /// 0: unknown.
    pid: AtomicU32,
    /// [`UNWANTED`], [`DUE`] or [`REQUESTED`].
    state: AtomicU32,
}

impl HostPid {
    /// Returns the PID if it is known; otherwise makes the request due, if it was not made before.
    pub(crate) fn known(&self) -> Option<u32> {
        let _ = self.state.compare_exchange(UNWANTED, DUE, Ordering::Relaxed, Ordering::Relaxed);
        let pid = self.pid.load(Ordering::Acquire);
        (pid != 0).then_some(pid)
    }

    /// Makes the request if it is due; returns the answer.
    #[inline]
    pub(crate) fn request_if_due(&self) -> Option<u32> {
        if self.state.load(Ordering::Relaxed) == DUE { self.request() } else { None }
    }

    #[cold]
    fn request(&self) -> Option<u32> {
        // One thread asks; the others do not wait for it.
        let claims =
            self.state.compare_exchange(DUE, REQUESTED, Ordering::Relaxed, Ordering::Relaxed);
        claims.ok()?;
        let pid = ask_host(sys::monotonic_ns())?;
        // Slots that are attached from now on read it here.
        self.pid.store(pid, Ordering::Release);
        Some(pid)
    }
}

fn ask_host(now: u64) -> Option<u32> {
    // If the file does not exist, no socket is created: a program may have forbidden that call.
    sys::status(HERE, SOCKET, 0)?;
    let host = Connection::open(SOCKET)?;
    host.await_bytes(now + TIMEOUT_NS);
    let mut answer = [0; LEN];
    (host.receive(&mut answer) == LEN).then(|| parse(&answer)).flatten()
}
