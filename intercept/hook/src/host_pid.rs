//! What the host calls this process, for its slots: asked of the driver's socket once a slot is there, and never needed.
//!
//! Where nobody answers nothing changes, and it is tried again after a minute at the earliest. The protocol is
//! `tessera_intercept_abi::host_pid`; what becomes of the answer is in `docs/adr/0086-what-the-host-calls-a-process.md`.

use core::ffi::CStr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tessera_intercept_abi::host_pid::{LEN, parse};

use crate::root::with_state;
use crate::sys::{self, Connection, HERE};

const SOCKET: &CStr = c"/dev/tessera/host/pid.sock";

/// How long an answer is waited for: far more than a driver takes that does anything at all.
const PATIENCE_NS: u64 = 50_000_000;

/// How long it takes at least until it is tried again.
const AGAIN_NS: u64 = 60_000_000_000;

/// The clock is looked at once in so many uses of the state.
const USES: u32 = 4096;

/// Nobody wants to know it.
const UNWANTED: u32 = 0;
/// It is asked for at the next use of the state.
const DUE: u32 = 1;

/// What is known of it. All zeroes is its beginning, which the kernel gives forked children: they are other processes.
#[repr(C)]
pub(crate) struct HostPid {
    /// 0: not known.
    pid: AtomicU32,
    /// [`UNWANTED`], or uses of the state until it is looked whether to ask.
    due_in: AtomicU32,
    /// When it was asked for, the last time; 0: never.
    asked_at_ns: AtomicU64,
}

impl HostPid {
    /// What the host has said; has it asked where it has said nothing yet.
    pub(crate) fn known(&self) -> Option<u32> {
        let pid = self.pid.load(Ordering::Acquire);
        if pid == 0 && self.due_in.load(Ordering::Relaxed) == UNWANTED {
            self.due_in.store(DUE, Ordering::Relaxed);
        }
        (pid != 0).then_some(pid)
    }

    /// Asks the host, if somebody wants to know.
    #[inline]
    pub(crate) fn ask_if_due(&self) {
        match self.due_in.load(Ordering::Relaxed) {
            UNWANTED => {}
            DUE => self.ask(),
            // Threads that count at the same time count once: it is no matter of one use.
            uses => self.due_in.store(uses - 1, Ordering::Relaxed),
        }
    }

    #[cold]
    fn ask(&self) {
        // One thread asks, and the others do not wait for it.
        if self.due_in.compare_exchange(DUE, USES, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        let (now, before) = (sys::monotonic_ns(), self.asked_at_ns.load(Ordering::Relaxed));
        if before != 0 && now.saturating_sub(before) < AGAIN_NS {
            return;
        }
        self.asked_at_ns.store(now, Ordering::Relaxed);
        if let Some(pid) = request(now) {
            self.pid.store(pid, Ordering::Release);
            self.due_in.store(UNWANTED, Ordering::Relaxed);
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
