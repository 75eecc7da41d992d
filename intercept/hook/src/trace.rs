//! Lines on stderr for the user of a program: why memory was refused, and how long launches were
//! held. Only with `TESSERA_TRACE=1` in the program's environment at its start: a guest does not
//! write into the output of programs.

use core::ffi::CStr;
use core::fmt::{Arguments, Write as _};
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use tessera_intercept_abi::GpuUuid;
use tessera_intercept_limiter::compute::Rate;

use crate::root::with_state;
use crate::sys::{self, Fd, HERE};

/// The variable, as it begins in the environment.
const VARIABLE: &[u8] = b"TESSERA_TRACE=";

/// Why memory was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The shares hold less.
    Limit {
        /// Bytes that all processes hold.
        used: u64,
        /// Bytes that they may hold.
        limit: u64,
    },
    /// The container has no share of the GPU.
    NoShare,
    /// A grant or a ledger cannot be used.
    Unusable,
}

/// A refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) gpu: GpuUuid,
    /// Bytes asked for.
    pub(crate) bytes: u64,
    pub(crate) reason: Reason,
}

/// The last refusal, until it is reported. All zeroes is none.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct LastRefusal {
    /// 0: none; 1, 2, 3: the [`Reason`]s in their order.
    reason: u64,
    used: u64,
    limit: u64,
    bytes: u64,
    gpu: GpuUuid,
}

impl LastRefusal {
    pub(crate) fn put(&mut self, Refusal { gpu, bytes, reason }: Refusal) {
        let (reason, used, limit) = match reason {
            Reason::Limit { used, limit } => (1, used, limit),
            Reason::NoShare => (2, 0, 0),
            Reason::Unusable => (3, 0, 0),
        };
        *self = Self { reason, used, limit, bytes, gpu };
    }

    fn take(&mut self) -> Option<Refusal> {
        let Self { used, limit, bytes, gpu, .. } = *self;
        let reason = match core::mem::replace(&mut self.reason, 0) {
            1 => Reason::Limit { used, limit },
            2 => Reason::NoShare,
            3 => Reason::Unusable,
            _ => return None,
        };
        Some(Refusal { gpu, bytes, reason })
    }
}

/// Says why the last refused allocation was refused, if that was not said yet.
pub(crate) fn refusal() {
    if !is_on() {
        return;
    }
    let Some(Refusal { gpu, bytes, reason }) =
        with_state(|state| state.last_refusal().take()).flatten()
    else {
        return;
    };
    match reason {
        Reason::Limit { used, limit } => say(format_args!(
            "{gpu}: {bytes} bytes refused: {used} of {limit} bytes of the container's memory are used"
        )),
        Reason::NoShare => {
            say(format_args!(
                "{gpu}: {bytes} bytes refused: the container has no share of this GPU"
            ));
        }
        Reason::Unusable => say(format_args!(
            "{gpu}: {bytes} bytes refused: the grant or the ledger of the share cannot be used"
        )),
    }
}

/// Says why a grant does not count; returns that there is none.
pub(crate) fn ignored_grant<T>(name: &CStr, why: &str) -> Option<T> {
    if is_on() {
        let name = name.to_str().unwrap_or("?");
        say(format_args!("the grant /dev/tessera/{name} is ignored: {why}"));
    }
    None
}

/// Launches that were held and not reported yet.
#[derive(Debug)]
pub(crate) struct Held {
    count: AtomicU64,
    ns: AtomicU64,
    /// The last report, monotonic ns.
    reported: AtomicU64,
}

impl Held {
    /// A launch was held, until `now`. At most one line a second.
    pub(crate) fn add(&self, ns: u64, rate: impl FnOnce() -> Option<Rate>, now: u64) {
        const EVERY_NS: u64 = 1_000_000_000;
        if ns == 0 || !is_on() {
            return;
        }
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        let all_ns = self.ns.fetch_add(ns, Ordering::Relaxed) + ns;
        let reported = self.reported.load(Ordering::Relaxed);
        let is_due = reported == 0 || now.saturating_sub(reported) >= EVERY_NS;
        let claims = || {
            self.reported
                .compare_exchange(reported, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        };
        if !is_due || !claims() {
            return;
        }
        self.count.fetch_sub(count, Ordering::Relaxed);
        self.ns.fetch_sub(all_ns, Ordering::Relaxed);
        let (us, hundredths) = (all_ns / 1_000, rate().unwrap_or(Rate::FULL).hundredths());
        say(format_args!(
            "{count} launches held for {us} us: the container has {}.{:02} % of the GPU's time",
            hundredths / 100,
            hundredths % 100
        ));
    }
}

/// Whether the variable is set; read once.
fn is_on() -> bool {
    const OFF: u8 = 1;
    const ON: u8 = 2;
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let is_on = value_is_one().unwrap_or(false);
            KNOWN.store(if is_on { ON } else { OFF }, Ordering::Relaxed);
            is_on
        }
        known => known == ON,
    }
}

/// Reads the environment that the program was started with: what it has now may be written by
/// another thread. `None` where it cannot be read.
fn value_is_one() -> Option<bool> {
    let file = Fd::open_at(HERE, c"/proc/self/environ", libc::O_RDONLY)?;
    let (mut buffer, mut offset) = ([0_u8; 512], 0);
    // How much of the variable was matched so far; `None`: not at the begin of an entry.
    let mut matched = Some(0);
    loop {
        let read = file.read_at(&mut buffer, offset)?;
        for &byte in buffer.get(..read)? {
            matched = match matched {
                _ if byte == 0 => Some(0),
                Some(at) if at == VARIABLE.len() => return Some(byte == b'1'),
                Some(at) if VARIABLE.get(at) == Some(&byte) => Some(at + 1),
                _ => None,
            };
        }
        if read == 0 {
            return Some(false);
        }
        offset += read as u64;
    }
}

/// A line of at most 256 bytes; what is longer is cut.
struct Line {
    bytes: [u8; 256],
    length: usize,
}

impl core::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        for &byte in text.as_bytes() {
            let place = self.bytes.get_mut(self.length).ok_or(core::fmt::Error)?;
            *place = byte;
            self.length += 1;
        }
        Ok(())
    }
}

fn say(text: Arguments<'_>) {
    let mut line = Line { bytes: [0; 256], length: 0 };
    // A line that does not fit is said as far as it fits.
    let _ = writeln!(line, "tessera: {text}");
    sys::write_stderr(line.bytes.get(..line.length).unwrap_or_default());
}
