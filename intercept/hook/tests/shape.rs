//! The library as it ships is a quiet guest: what it needs, what it exports, what it does to programs that have no GPU.

mod container;

use container::{Node, can_contain, exported, inspect};

#[test]
fn it_needs_libc_only_and_starts_nothing() {
    let dynamic = inspect("readelf", &["--dynamic", "--wide"]);
    let needed: Vec<_> = dynamic.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(needed.len() == 1 && needed[0].contains("[libc.so.6]"), "{needed:?}");
    for entry in ["(INIT)", "(INIT_ARRAY)", "(PREINIT_ARRAY)", "(FINI)", "(FINI_ARRAY)", "(TEXTREL)"] {
        assert!(!dynamic.contains(entry), "{entry} in {dynamic}");
    }
}

#[test]
fn it_runs_with_an_old_glibc() {
    let symbols = inspect("objdump", &["--dynamic-syms"]);
    for line in symbols.lines().filter(|line| line.contains("GLIBC_")) {
        let version =
            line.split("GLIBC_").nth(1).and_then(|rest| rest.split([')', ' ']).next()).expect("a version");
        let minor: u32 = version.split('.').nth(1).and_then(|minor| minor.parse().ok()).expect("2.x");
        assert!(minor <= 17, "{line}");
    }
}

#[test]
fn it_asks_libc_for_nothing_that_takes_memory_or_a_lock() {
    // Whatever it called in there could be the program's own, in the middle of anything.
    let allowed = [
        "abort",
        "bcmp",
        "dl_iterate_phdr",
        "environ",
        "memcmp",
        "memcpy",
        "memmove",
        "memset",
        "strlen",
        "syscall",
    ];
    let imports = inspect("nm", &["--dynamic", "--undefined-only"]);
    for line in imports.lines() {
        let name = line.trim().trim_start_matches("U ").split('@').next().expect("a name");
        assert!(allowed.contains(&name), "{line}");
    }
}

#[test]
fn it_exports_hooks_and_nothing_else() {
    let exported = exported();
    let is_hook = |name: &String| {
        name.starts_with("cu") || name.starts_with("nvml") || matches!(name.as_str(), "dlsym" | "dlvsym")
    };
    assert!(exported.iter().all(is_hook), "{exported:?}");
    for name in
        ["dlsym", "cuMemAlloc_v2", "cuGetProcAddress_v2", "nvmlDeviceGetMemoryInfo", "cuLaunchKernelEx_ptsz"]
    {
        assert!(exported.contains(name), "{name}");
    }
}

#[test]
fn programs_without_a_gpu_notice_nothing() {
    if !can_contain("programs_without_a_gpu_notice_nothing") {
        return;
    }
    let node = Node::new();
    let container = node.contain(&[]);
    let output = container
        .run("sh", &["-c", "for i in 1 2 3; do ls / | wc -l >/dev/null; done; echo $((6 * 7)); exit 5"]);
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "42\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
