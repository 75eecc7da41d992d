//! Dependencies and exports of the shipped libraries, and their effect on programs without a GPU.

mod container;

use std::path::{Path, PathBuf};

use container::{
    Node, REAL, exported, exported_by, inspect, intercept, intercept_for_hami, proxies, set_up,
};
use tessera_intercept_symbols::{Library, TABLE};
use tessera_test_support::test_name;

/// A shipped library.
struct Artefact {
    file: PathBuf,
    /// Its soname.
    name: String,
    /// The library that it replaces and depends on.
    real: Option<String>,
    /// Its imports from libc that the others do not have.
    extra_imports: &'static [&'static str],
}

impl Artefact {
    fn all() -> Vec<Self> {
        let preloaded = |file: &Path, extra_imports| Self {
            file: file.to_owned(),
            name: "libtessera_intercept.so".to_owned(),
            real: None,
            extra_imports,
        };
        // It ignores variables in setuid programs.
        let preloaded =
            [preloaded(intercept(), &[]), preloaded(intercept_for_hami(), &["getauxval"])];
        let proxies = proxies().iter().map(|[name, file]| Self {
            file: file.clone(),
            name: name.display().to_string(),
            real: Some(Path::new(REAL).join(name).display().to_string()),
            // Used to hide functions that the real library lacks.
            extra_imports: &["getauxval", "mprotect"],
        });
        preloaded.into_iter().chain(proxies).collect()
    }

    /// Returns its dynamic section.
    fn dynamic(&self) -> String {
        inspect("readelf", &["--dynamic", "--wide"], &self.file)
    }
}

#[test]
fn libraries_need_only_libc_and_the_library_they_replace() {
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

/// A proxy, which only programs with a GPU load, hides functions that the real library lacks. The
/// build for HAMi's variables removes the process from the file of HAMi's monitor at exit.
#[test]
fn only_proxies_initialize_and_only_hamis_build_ends() {
    for artefact in Artefact::all() {
        let dynamic = artefact.dynamic();
        for entry in ["(INIT)", "(PREINIT_ARRAY)", "(FINI)", "(TEXTREL)"] {
            assert!(!dynamic.contains(entry), "{entry} in {}: {dynamic}", artefact.file.display());
        }
        let length = |entry: &str| {
            let line = dynamic.lines().find(|line| line.contains(entry))?;
            line.split_whitespace().nth(2)
        };
        let is_for_hami = artefact.file == intercept_for_hami();
        for (entry, has_one) in
            [("(INIT_ARRAYSZ)", artefact.real.is_some()), ("(FINI_ARRAYSZ)", is_for_hami)]
        {
            let expected = has_one.then_some("8");
            assert_eq!(length(entry), expected, "{}: {dynamic}", artefact.file.display());
        }
    }
}

/// A proxy's symbol table is writable for a moment, and must not be executable then.
#[test]
fn segment_of_symbols_has_no_code() {
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
fn libraries_run_with_glibc_2_17() {
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
fn libraries_import_nothing_that_allocates_or_locks() {
    // The functions could be the program's own, and could be called at any point.
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
                allowed.contains(&name) || artefact.extra_imports.contains(&name),
                "{}: {line}",
                artefact.file.display()
            );
        }
    }
}

#[test]
fn preload_library_exports_only_hooks() {
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
    assert_eq!(&exported_by(intercept_for_hami()), exported);
}

/// Programs can be linked with it, and a lookup finds its jump and not the real function.
#[test]
fn proxy_exports_exactly_the_functions_of_its_library() {
    for ([_, proxy], library) in proxies().iter().zip([Library::Cuda, Library::Nvml]) {
        let mut names = exported_by(proxy);
        assert!(names.remove("tessera_intercept_proxy"), "by which a proxy is known");
        let table = TABLE.iter().filter(|symbol| symbol.library() == library);
        assert!(table.map(|symbol| symbol.symbol.text).eq(names.iter().map(String::as_str)));
    }
}

#[test]
fn programs_without_gpu_are_unaffected() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let container = node.container(&[]);
    let output = container.run(
        "sh",
        &["-c", "for i in 1 2 3; do ls / | wc -l >/dev/null; done; echo $((6 * 7)); exit 5"],
    );
    assert_eq!(output.status.code(), Some(5));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "42\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
