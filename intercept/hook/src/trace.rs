//! Lines on stderr for the user of a program: reasons of refusals, and the time that launches were
//! held. Only if the program was started with `TESSERA_TRACE=1`, because the output of a program is
//! its own.

use core::ffi::CStr;
use core::fmt::{Arguments, Write as _};
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use tessera_intercept_abi::GpuUuid;
use tessera_intercept_limiter::compute::Rate;

use crate::sys::{self, Fd, HERE};

/// Beginning of the variable's entry in the environment.
const VARIABLE: &[u8] = b"TESSERA_TRACE=";

/// Reason of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The limit of the shares.
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

/// Refusal of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RefusedAllocation {
    pub(crate) gpu: GpuUuid,
    /// Bytes asked for.
    pub(crate) bytes: u64,
    pub(crate) reason: Reason,
}

/// Last refusal until it is reported. All zeroes is none.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct LastRefusal {
    /// 0: no refusal; 1, 2, 3: the [`Reason`]s in their order.
    reason: u64,
    used: u64,
    limit: u64,
    bytes: u64,
    gpu: GpuUuid,
}

impl LastRefusal {
    pub(crate) fn put(&mut self, RefusedAllocation { gpu, bytes, reason }: RefusedAllocation) {
        let (reason, used, limit) = match reason {
            Reason::Limit { used, limit } => (1, used, limit),
            Reason::NoShare => (2, 0, 0),
            Reason::Unusable => (3, 0, 0),
        };
        *self = Self { reason, used, limit, bytes, gpu };
    }

    pub(crate) fn take(&mut self) -> Option<RefusedAllocation> {
        let Self { used, limit, bytes, gpu, .. } = *self;
        let reason = match core::mem::replace(&mut self.reason, 0) {
            1 => Reason::Limit { used, limit },
            2 => Reason::NoShare,
            3 => Reason::Unusable,
            _ => return None,
        };
        Some(RefusedAllocation { gpu, bytes, reason })
    }
}

/// Prints a refusal.
pub(crate) fn refusal(RefusedAllocation { gpu, bytes, reason }: RefusedAllocation) {
    match reason {
        Reason::Limit { used, limit } => print(format_args!(
            "{gpu}: {bytes} bytes refused: {used} of {limit} bytes of the container's memory are used"
        )),
        Reason::NoShare => {
            print(format_args!(
                "{gpu}: {bytes} bytes refused: the container has no share of this GPU"
            ));
        }
        Reason::Unusable => print(format_args!(
            "{gpu}: {bytes} bytes refused: the grant or the ledger of the share cannot be used"
        )),
    }
}

/// Prints the reason for which a grant is ignored. Returns `None`.
pub(crate) fn ignored_grant<T>(name: &CStr, why: &str) -> Option<T> {
    if is_on() {
        let name = name.to_str().unwrap_or("?");
        print(format_args!("the grant /dev/tessera/{name} is ignored: {why}"));
    }
    None
}

/// Held launches that were not reported yet.
#[derive(Debug)]
pub(crate) struct Held {
    count: AtomicU64,
    ns: AtomicU64,
    /// The last report, monotonic ns.
    reported: AtomicU64,
}

impl Held {
    /// Adds a launch that was held until `now`. Prints at most one line a second.
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
        print(format_args!(
            "{count} launches held for {us} us: the container has {}.{:02} % of the GPU's time",
            hundredths / 100,
            hundredths % 100
        ));
    }
}

/// Returns true if the variable is set; it is read once.
pub(crate) fn is_on() -> bool {
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

/// Reads the environment that the program was started with: another thread may be writing to the
/// current one. `None` if it cannot be read.
fn value_is_one() -> Option<bool> {
    let file = Fd::open_at(HERE, c"/proc/self/environ", libc::O_RDONLY)?;
    let (mut buffer, mut offset) = ([0_u8; 512], 0);
    // Bytes of the name that have matched so far; `None`: this entry does not match.
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

/// Line of at most 256 bytes; a longer one is cut.
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

fn print(text: Arguments<'_>) {
    let mut line = Line { bytes: [0; 256], length: 0 };
    // A line that is too long is printed as far as it fits.
    let _ = writeln!(line, "tessera: {text}");
    sys::write_stderr(line.bytes.get(..line.length).unwrap_or_default());
}
