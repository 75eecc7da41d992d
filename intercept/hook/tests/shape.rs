//! The libraries as they ship are quiet guests: what they need, what they export, what they do to
//! programs that have no GPU.

mod container;

use std::path::{Path, PathBuf};

use container::{
    Node, REAL, built_for_hami, can_contain, exported, exported_by, inspect, intercept, proxies,
};
use tessera_intercept_symbols::{Library, TABLE};

/// A library that ships.
struct Artefact {
    file: PathBuf,
    /// Its name for the loader.
    name: String,
    /// The library that it stands in the place of, and so needs.
    real: Option<String>,
    /// What it asks libc for that the others do not.
    also: &'static [&'static str],
}

impl Artefact {
    fn all() -> Vec<Self> {
        let preloaded = |file: &Path, also| Self {
            file: file.to_owned(),
            name: "libtessera_intercept.so".to_owned(),
            real: None,
            also,
        };
        // It believes no variables of a program that has more rights than who started it.
        let preloaded = [preloaded(intercept(), &[]), preloaded(built_for_hami(), &["getauxval"])];
        let proxies = proxies().iter().map(|[name, file]| Self {
            file: file.clone(),
            name: name.display().to_string(),
            real: Some(Path::new(REAL).join(name).display().to_string()),
            // By which it hides what the real one does not have.
            also: &["getauxval", "mprotect"],
        });
        preloaded.into_iter().chain(proxies).collect()
    }

    /// What its dynamic section says.
    fn dynamic(&self) -> String {
        inspect("readelf", &["--dynamic", "--wide"], &self.file)
    }
}

#[test]
fn each_needs_libc_only_and_a_proxy_the_library_that_it_stands_for() {
    for artefact in Artefact::all() {
        let dynamic = artefact.dynamic();
        let of = |kind: &str| -> Vec<String> {
            let lines = dynamic.lines().filter(|line| line.contains(kind));
            lines.filter_map(|line| line.split(['[', ']']).nth(1).map(str::to_owned)).collect()
        };
        let needed: Vec<_> =
            ["libc.so.6".to_owned()].into_iter().chain(artefact.real.clone()).collect();
        assert_eq!(of("(NEEDED)"), needed, "{}", artefact.file.display());
        assert_eq!(of("(SONAME)"), [artefact.name]);
        assert_eq!(
            dynamic.contains("NODELETE"),
            artefact.real.is_some(),
            "charges outlive a proxy's user"
        );
    }
}

/// A proxy, which nothing loads that does not want the driver, hides what the real one does not
/// have.
#[test]
fn none_starts_anything_when_it_is_loaded_but_a_proxy_one_thing() {
    for artefact in Artefact::all() {
        let dynamic = artefact.dynamic();
        for entry in ["(INIT)", "(PREINIT_ARRAY)", "(FINI)", "(FINI_ARRAY)", "(TEXTREL)"] {
            assert!(!dynamic.contains(entry), "{entry} in {}: {dynamic}", artefact.file.display());
        }
        let length = dynamic.lines().find(|line| line.contains("(INIT_ARRAYSZ)"));
        let length = length.and_then(|line| line.split_whitespace().nth(2));
        assert_eq!(
            length,
            artefact.real.as_ref().map(|_| "8"),
            "{}: {dynamic}",
            artefact.file.display()
        );
    }
}

/// For a moment a proxy's table of symbols may be written, and not executed.
#[test]
fn no_code_lies_in_a_segment_with_the_symbols() {
    for artefact in Artefact::all() {
        let headers = inspect("readelf", &["--program-headers", "--wide"], &artefact.file);
        let segments: Vec<_> = headers.lines().filter(|line| line.contains(" .dynsym ")).collect();
        assert!(!segments.is_empty(), "{headers}");
        for code in [" .plt ", " .text "] {
            assert!(
                segments.iter().all(|line| !line.contains(code)),
                "{}: {headers}",
                artefact.file.display()
            );
        }
    }
}

#[test]
fn each_runs_with_an_old_glibc() {
    for artefact in Artefact::all() {
        let symbols = inspect("objdump", &["--dynamic-syms"], &artefact.file);
        let versioned: Vec<_> = symbols.lines().filter(|line| line.contains("GLIBC_")).collect();
        assert!(!versioned.is_empty(), "{symbols}");
        for line in versioned {
            let version =
                line.split("GLIBC_2.").nth(1).and_then(|rest| rest.split(['.', ')', ' ']).next());
            let minor = version.and_then(|minor| minor.parse::<u32>().ok());
            assert!(minor.is_some_and(|minor| minor <= 17), "{}: {line}", artefact.file.display());
        }
    }
}

#[test]
fn none_asks_libc_for_anything_that_takes_memory_or_a_lock() {
    // Whatever it called in there could be the program's own, in the middle of anything.
    let allowed = [
        "__environ", // the same as `environ`: newer linkers name both
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
    for artefact in Artefact::all() {
        let imports = inspect("nm", &["--dynamic", "--undefined-only"], &artefact.file);
        for line in imports.lines() {
            let name = line.trim().trim_start_matches("U ").split('@').next().expect("a name");
            assert!(
                allowed.contains(&name) || artefact.also.contains(&name),
                "{}: {line}",
                artefact.file.display()
            );
        }
    }
}

#[test]
fn a_preloaded_one_exports_hooks_and_nothing_else() {
    let exported = exported();
    let is_hook = |name: &String| {
        name.starts_with("cu")
            || name.starts_with("nvml")
            || matches!(name.as_str(), "dlsym" | "dlvsym")
    };
    assert!(exported.iter().all(is_hook), "{exported:?}");
    for name in [
        "dlsym",
        "cuMemAlloc_v2",
        "cuGetProcAddress_v2",
        "nvmlDeviceGetMemoryInfo",
        "cuLaunchKernelEx_ptsz",
    ] {
        assert!(exported.contains(name), "{name}");
    }
    assert_eq!(&exported_by(built_for_hami()), exported);
}

/// So that programs can be linked with it, and one that looks a function up finds a jump and not
/// the real one.
#[test]
fn a_proxy_exports_every_function_of_its_library_and_none_of_the_loaders() {
    for ([_, proxy], library) in proxies().iter().zip([Library::Cuda, Library::Nvml]) {
        let mut names = exported_by(proxy);
        assert!(names.remove("tessera_intercept_proxy"), "by which a proxy is known");
        let table = TABLE.iter().filter(|symbol| symbol.library() == library);
        assert!(table.map(|symbol| symbol.symbol.text).eq(names.iter().map(String::as_str)));
    }
}

#[test]
fn programs_without_a_gpu_notice_nothing() {
    if !can_contain("programs_without_a_gpu_notice_nothing") {
        return;
    }
    let node = Node::new();
    let container = node.contain(&[]);
    let output = container.run(
        "sh",
        &["-c", "for i in 1 2 3; do ls / | wc -l >/dev/null; done; echo $((6 * 7)); exit 5"],
    );
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "42\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
