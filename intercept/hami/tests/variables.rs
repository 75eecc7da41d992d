//! The variables as HAMi-core reads them; numbers against the C library's own `strtoul`, by which
//! HAMi-core reads them.

use std::collections::BTreeMap;
use std::ffi::CString;

use proptest::prelude::*;
use tessera_intercept_hami::{GPUS, MemoryVariable, Variables};

const GIB: u64 = 1 << 30;

/// Runs something on variables.
fn with<T>(
    variables: &[(&str, &str)],
    run: impl FnOnce(&dyn Fn(&[u8]) -> Option<&'static [u8]>) -> T,
) -> T {
    let table: BTreeMap<Vec<u8>, &'static [u8]> = variables
        .iter()
        .map(|(name, value)| (name.as_bytes().to_vec(), &*value.as_bytes().to_vec().leak()))
        .collect();
    run(&|name| table.get(name).copied())
}

fn memory(variables: &[(&str, &str)], gpu: usize) -> MemoryVariable {
    with(variables, |get| Variables(get).memory(gpu))
}

fn cores(variables: &[(&str, &str)], gpu: usize) -> Option<u32> {
    with(variables, |get| Variables(get).cores(gpu))
}

#[test]
fn memory_is_read_as_hami_core_reads_it() {
    use MemoryVariable::{Bytes, Unlimited};
    let table = [
        ("1073741824", Bytes(GIB)),
        ("3000m", Bytes(3000 << 20)),
        ("3000M", Bytes(3000 << 20)),
        ("2g", Bytes(2 * GIB)),
        ("2G", Bytes(2 * GIB)),
        ("1024k", Bytes(1 << 20)),
        ("1024K", Bytes(1 << 20)),
        ("0x400m", Bytes(GIB)),
        ("010k", Bytes(8 << 10)),
        (" \t7m", Bytes(7 << 20)),
        ("+7m", Bytes(7 << 20)),
        ("10 m", Bytes(10 << 20)),
        ("1.5g", Bytes(GIB)),
        ("10xyz", Bytes(10)),
        ("7mb", Bytes(7)),
        ("", Unlimited),
        ("0", Unlimited),
        ("0m", Unlimited),
        ("-0", Unlimited),
        ("08m", Unlimited),
        ("0x", Unlimited),
        ("18446744073709551616", Bytes(u64::MAX)),
        ("99999999999999999999g", Bytes(u64::MAX)),
        // Stricter than HAMi-core, to which these are no limit, or 2^64 bytes less something.
        ("-1", Bytes(0)),
        ("m", Bytes(0)),
        ("all", Bytes(0)),
        ("- 1", Bytes(0)),
    ];
    for (text, expected) in table {
        assert_eq!(memory(&[("CUDA_DEVICE_MEMORY_LIMIT", text)], 0), expected, "`{text}`");
        assert_eq!(memory(&[("CUDA_DEVICE_MEMORY_LIMIT_3", text)], 3), expected, "`{text}`");
    }
}

#[test]
fn the_limit_of_one_gpu_goes_before_the_general_one() {
    let variables = [
        ("CUDA_DEVICE_MEMORY_LIMIT", "4g"),
        ("CUDA_DEVICE_MEMORY_LIMIT_1", "1g"),
        ("CUDA_DEVICE_MEMORY_LIMIT_2", "0"),
        ("CUDA_DEVICE_MEMORY_LIMIT_15", "2g"),
    ];
    let of = |gpu| memory(&variables, gpu);
    assert_eq!(
        [of(0), of(1), of(2), of(15), of(16)],
        [4, 1, 4, 2, 4].map(|gib| MemoryVariable::Bytes(gib * GIB))
    );
    assert_eq!(with(&variables, |get| Variables(get).least_memory()), MemoryVariable::Bytes(GIB));
    assert_eq!(memory(&[], 0), MemoryVariable::Unlimited);
    assert_eq!(with(&[], |get| Variables(get).least_memory()), MemoryVariable::Unlimited);
}

#[test]
fn compute_is_a_percent_that_a_policy_can_turn_off() {
    let limit = |text| cores(&[("CUDA_DEVICE_SM_LIMIT", text)], 0);
    assert_eq!(
        ["30", "0", "100", "150", "99", "", "none"].map(limit),
        [Some(30), None, None, None, Some(99), None, Some(1)]
    );
    assert_eq!(
        cores(&[("CUDA_DEVICE_SM_LIMIT", "30"), ("CUDA_DEVICE_SM_LIMIT_1", "60")], 1),
        Some(60)
    );
    let least = |variables: &[(&str, &str)]| with(variables, |get| Variables(get).least_cores());
    assert_eq!(
        least(&[("CUDA_DEVICE_SM_LIMIT", "30"), ("CUDA_DEVICE_SM_LIMIT_1", "20")]),
        Some(20)
    );
    assert_eq!(least(&[]), None);
    for (policy, expected) in [
        ("disable", None),
        ("DISABLE", None),
        ("force", Some(30)),
        ("FORCE", Some(30)),
        ("Disable", Some(30)),
    ] {
        let variables = [("CUDA_DEVICE_SM_LIMIT", "30"), ("GPU_CORE_UTILIZATION_POLICY", policy)];
        assert_eq!(cores(&variables, 0), expected, "{policy}");
    }
}

#[test]
fn visible_devices_say_which_gpu_an_ordinal_is() {
    let gpu = |list, ordinal| {
        with(&[("CUDA_VISIBLE_DEVICES", list)], |get| Variables(get).gpu_of(ordinal))
    };
    assert_eq!([gpu("3,1", 0), gpu("3, 1", 1), gpu("3,1", 2)], [3, 1, 2]);
    assert_eq!([gpu("GPU-1f0c", 0), gpu("", 1)], [0, 1], "no numbers: as it is");
    assert_eq!(with(&[], |get| Variables(get).gpu_of(5)), 5);
}

#[test]
fn the_cache_has_hamis_default() {
    let cache = |variables: &[(&str, &str)]| with(variables, |get| Variables(get).cache());
    assert_eq!(cache(&[]), b"/tmp/cudevshr.cache");
    assert_eq!(cache(&[("CUDA_DEVICE_MEMORY_SHARED_CACHE", "")]), b"/tmp/cudevshr.cache");
    assert_eq!(
        cache(&[("CUDA_DEVICE_MEMORY_SHARED_CACHE", "/tmp/vgpu/u.cache")]),
        b"/tmp/vgpu/u.cache"
    );
}

#[test]
fn priority_has_hamis_default_and_is_never_0_by_mistake() {
    let priority = |variables: &[(&str, &str)]| with(variables, |get| Variables(get).priority());
    assert_eq!(priority(&[]), 1);
    for (text, expected) in [("0", 0), ("2", 2), (" 1 ", 1), ("-1", -1), ("high", 1), ("", 1)] {
        assert_eq!(priority(&[("CUDA_TASK_PRIORITY", text)]), expected, "{text}");
    }
}

#[test]
fn policy_and_oversubscription_are_exact_words() {
    let forced = |policy| {
        with(&[("GPU_CORE_UTILIZATION_POLICY", policy)], |get| {
            Variables(get).always_limits_compute()
        })
    };
    assert_eq!(["force", "FORCE", "Force", "disable"].map(forced), [true, true, false, false]);
    let spills =
        |word| with(&[("CUDA_OVERSUBSCRIBE", word)], |get| Variables(get).oversubscribes());
    assert_eq!(["true", "1", "false", ""].map(spills), [true, true, false, false]);
}

/// HAMi-core's `get_limit_from_env`; 0 is no limit. `None` where this crate is stricter.
fn hami_core(text: &str) -> Option<u64> {
    let unit: u64 = match text.chars().last() {
        Some('k' | 'K') => 1 << 10,
        Some('m' | 'M') => 1 << 20,
        Some('g' | 'G') => 1 << 30,
        _ => 1,
    };
    let text = CString::new(text).expect("no zeroes");
    let mut end = std::ptr::null_mut();
    // SAFETY: a terminated string, and a place for where the number ends.
    let value = unsafe { libc::strtoul(text.as_ptr(), &mut end, 0) };
    let stricter = end.cast_const() == text.as_ptr() || text.to_string_lossy().contains('-');
    (!stricter).then_some(value.saturating_mul(unit))
}

proptest! {
    #[test]
    fn a_number_is_what_hami_core_makes_of_it(text in "[ \\t+0-9a-gA-GxXkKmM.]{1,24}|[0-9]{1,22}[kmgKMG]?|0[xX][0-9a-fA-F]{1,18}[kmgKMG]?") {
        if let Some(expected) = hami_core(&text) {
            let read = memory(&[("CUDA_DEVICE_MEMORY_LIMIT", &text)], 0);
            let read = match read { MemoryVariable::Unlimited => 0, MemoryVariable::Bytes(bytes) => bytes };
            prop_assert_eq!(read, expected, "`{}`", text);
        }
    }

    #[test]
    fn whatever_variables_say_there_is_an_answer(text in ".{0,40}", gpu in 0..64_usize) {
        let variables = [
            ("CUDA_DEVICE_MEMORY_LIMIT", &*text), ("CUDA_DEVICE_SM_LIMIT_7", &*text),
            ("CUDA_VISIBLE_DEVICES", &*text), ("GPU_CORE_UTILIZATION_POLICY", &*text),
        ];
        let percent = cores(&variables, gpu);
        prop_assert!(percent.is_none_or(|percent| (1..100).contains(&percent)));
        let bytes = memory(&variables, gpu);
        prop_assert!(gpu >= GPUS || with(&variables, |get| Variables(get).least_memory()) == bytes);
        with(&variables, |get| Variables(get).gpu_of(gpu));
    }
}
