//! What the host calls this process, for its slots: asked of the driver's socket once a slot is
//! there, and never needed.
//!
//! A process asks once in its life: where nobody answers nothing changes. The protocol is
//! `tessera_intercept_abi::host_pid`; what becomes of the answer is in
//! `docs/adr/0086-host-pids-and-usage-audit.md`.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, Ordering};

use tessera_intercept_abi::host_pid::{LEN, parse};

use crate::root::with_state;
use crate::sys::{self, Connection, HERE};

const SOCKET: &CStr = c"/dev/tessera/host/pid.sock";

/// How long an answer is waited for: far more than a driver takes that does anything at all.
const PATIENCE_NS: u64 = 200_000_000;

/// Nobody wants to know it yet.
const UNWANTED: u32 = 0;
/// It is asked for at the next use of the state.
const DUE: u32 = 1;
/// It was asked for.
const ASKED: u32 = 2;

/// What is known of it. All zeroes is its beginning, which the kernel gives forked children: they
/// are other processes.
#[repr(C)]
pub(crate) struct HostPid {
    /// 0: not known.
    pid: AtomicU32,
    /// [`UNWANTED`], [`DUE`] or [`ASKED`].
    state: AtomicU32,
}

impl HostPid {
    /// What the host has said; has it asked where it was not.
    pub(crate) fn known(&self) -> Option<u32> {
        let _ = self.state.compare_exchange(UNWANTED, DUE, Ordering::Relaxed, Ordering::Relaxed);
        let pid = self.pid.load(Ordering::Acquire);
        (pid != 0).then_some(pid)
    }

    /// Asks the host, if somebody wants to know.
    #[inline]
    pub(crate) fn ask_if_due(&self) {
        if self.state.load(Ordering::Relaxed) == DUE {
            self.ask();
        }
    }

    #[cold]
    fn ask(&self) {
        // One thread asks, and the others do not wait for it.
        if self.state.compare_exchange(DUE, ASKED, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        if let Some(pid) = request(sys::monotonic_ns()) {
            self.pid.store(pid, Ordering::Release);
            // Slots that come from now on find it there.
            with_state(|state| state.tell_host_pid(pid));
        }
    }
}

fn request(now: u64) -> Option<u32> {
    // Where there is nothing, no socket is made: programs can forbid themselves to.
    sys::status(HERE, SOCKET, 0)?;
    let host = Connection::open(SOCKET)?;
    host.await_bytes(now + PATIENCE_NS);
    let mut answer = [0; LEN];
    (host.receive(&mut answer) == LEN).then(|| parse(&answer)).flatten()
}
