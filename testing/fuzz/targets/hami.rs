//! Parses any environment as HAMi's: limits are valid, and numbers are parsed like C's `strtoul`.
#![no_main]

use std::ffi::CString;

use libfuzzer_sys::fuzz_target;
use tessera_intercept_hami::{GPUS, MemoryVariable, Variables};

/// The general variable, whose value is also parsed by the C library.
const MEMORY: &[u8] = b"CUDA_DEVICE_MEMORY_LIMIT";

/// Returns a variable's value from lines of `NAME=VALUE`; the first line is the general variable's
/// value.
fn value<'v>(environment: &'v [u8], name: &[u8]) -> Option<&'v [u8]> {
    let mut lines = environment.split(|byte| matches!(byte, b'\n' | 0));
    let first = lines.next();
    if name == MEMORY {
        return first;
    }
    lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix(b"=")).next()
}

/// Parses a limit like HAMi-core; 0 is none. Returns `None` if Tessera is stricter.
fn hami_core(text: &[u8]) -> Option<u64> {
    let unit: u64 = match text.last() {
        Some(b'k' | b'K') => 1 << 10,
        Some(b'm' | b'M') => 1 << 20,
        Some(b'g' | b'G') => 1 << 30,
        _ => 1,
    };
    let c = CString::new(text).ok()?;
    let mut end = std::ptr::null_mut();
    // SAFETY: the string is terminated and `end` is a valid pointer.
    let value = unsafe { libc::strtoul(c.as_ptr(), &mut end, 0) };
    let stricter = end.cast_const() == c.as_ptr() || text.contains(&b'-');
    (!stricter).then_some(value.saturating_mul(unit))
}

fn bytes(memory: MemoryVariable) -> u64 {
    match memory {
        MemoryVariable::Unlimited => u64::MAX,
        MemoryVariable::Bytes(bytes) => bytes,
    }
}

fuzz_target!(|environment: &[u8]| {
    let variables = Variables(|name: &[u8]| value(environment, name));
    let (least_memory, least_cores) =
        (bytes(variables.least_memory()), variables.least_cores().unwrap_or(100));
    for gpu in 0..=GPUS {
        assert!(variables.cores(gpu).is_none_or(|percent| (1..100).contains(&percent)));
        if gpu < GPUS {
            assert!(least_memory <= bytes(variables.memory(gpu)));
            assert!(least_cores <= variables.cores(gpu).unwrap_or(100));
        }
        let _ = variables.gpu_of(gpu);
    }
    assert!(!variables.cache().is_empty());
    // GPUs without a variable of their own use the general one.
    let general = variables.memory(GPUS);
    match value(environment, MEMORY).map(hami_core) {
        None | Some(Some(0)) => assert_eq!(general, MemoryVariable::Unlimited),
        Some(Some(limit)) => assert_eq!(general, MemoryVariable::Bytes(limit)),
        Some(None) => {}
    }
});
