//! The table against itself, against what a CUDA runtime asks for, and against the list of classes.

use std::collections::{BTreeMap, BTreeSet};

use tessera_intercept_symbols::{
    CLASSES, Library, Missing, PER_THREAD_STREAM, RELEASES, Symbol, SymbolVersion, TABLE, Variant,
    find, is_known, resolve,
};
use tessera_test_support::data::{ProcQuery, proc_queries};

fn of(library: Library) -> impl Iterator<Item = &'static Symbol> {
    TABLE.iter().filter(move |symbol| symbol.library() == library)
}

#[test]
fn symbols_are_sorted_and_there_once() {
    let unsorted = TABLE.windows(2).find(|pair| pair[0].symbol.text >= pair[1].symbol.text);
    assert_eq!(unsorted, None);
    for symbol in TABLE {
        assert_eq!(find(symbol.symbol.text), Some(*symbol));
    }
    assert_eq!(find("cuMemAlloc_v3"), None);
}

#[test]
fn every_name_of_the_table_is_known_and_no_other() {
    for symbol in TABLE {
        assert!(
            is_known(symbol.symbol.text.as_bytes()) && is_known(symbol.base.text.as_bytes()),
            "{symbol:?}"
        );
    }
    assert!(
        ["", "cu", "cuMemAlloc_v3", "cuFunctionOfTomorrow"]
            .iter()
            .all(|name| !is_known(name.as_bytes()))
    );
}

#[test]
fn a_form_is_one_symbol() {
    let mut seen = BTreeMap::new();
    for symbol in of(Library::Cuda) {
        let form = (symbol.base.text, symbol.version, symbol.variant.map(|variant| variant as u8));
        let other = seen.insert(form, symbol.symbol.text);
        assert_eq!(other, None, "{}: the same form", symbol.symbol.text);
    }
}

#[test]
fn the_table_reaches_from_11_7_to_13_5() {
    let releases: Vec<_> = RELEASES.iter().map(ToString::to_string).collect();
    let releases = releases.join(" ");
    let all =
        "11.7 11.8 12.0 12.1 12.2 12.3 12.4 12.5 12.6 12.8 12.9 13.0 13.1 13.2 13.3 13.4 13.5";
    assert_eq!(releases, all);
    let count =
        |library, version| of(library).filter(|symbol| symbol.is_exported_by(version)).count();
    // As many as the headers of the first and the last release declare (and those that were inline
    // or dropped on the way).
    assert_eq!(
        (count(Library::Cuda, SymbolVersion(11_070)), count(Library::Nvml, SymbolVersion(11_070))),
        (543, 282)
    );
    assert_eq!(
        (count(Library::Cuda, SymbolVersion(13_050)), count(Library::Nvml, SymbolVersion(13_050))),
        (725, 441)
    );
}

#[test]
fn no_symbol_is_older_than_its_form() {
    for symbol in TABLE {
        assert!(symbol.first <= symbol.last && symbol.version <= symbol.first, "{symbol:?}");
        let suffix = match symbol.variant {
            None => "",
            Some(Variant::Ptds) => "_ptds",
            Some(Variant::Ptsz) => "_ptsz",
        };
        assert!(
            symbol.symbol.text.starts_with(symbol.base.text)
                && symbol.symbol.text.ends_with(suffix),
            "{symbol:?}"
        );
    }
}

#[test]
fn every_query_of_a_runtime_gets_the_form_of_just_that_version() {
    let queries = proc_queries();
    for driver in [SymbolVersion(12_090), SymbolVersion(13_000), SymbolVersion(13_050)] {
        for ProcQuery { name, version, flags } in &queries {
            let version = &SymbolVersion(*version);
            let found = resolve(name, *version, *flags, driver)
                .unwrap_or_else(|why| panic!("{name}: {why:?}"));
            if name.is_empty() {
                assert_eq!(found.symbol.text, "cuGetProcAddress_v2");
                continue;
            }
            // A runtime asks with the version of the form that it was built for.
            assert_eq!((found.base.text, found.version), (name.as_str(), *version));
            let has_variant = of(Library::Cuda).any(|symbol| {
                symbol.base == found.base && symbol.version == *version && symbol.variant.is_some()
            });
            let wanted = *flags & PER_THREAD_STREAM != 0 && has_variant;
            assert_eq!(found.variant.is_some(), wanted, "{name} {flags}");
        }
    }
}

#[test]
fn an_older_driver_has_not_what_came_after_it() {
    let symbol = |name, version, flags, driver| {
        resolve(name, SymbolVersion(version), flags, SymbolVersion(driver))
            .map(|symbol| symbol.symbol.text)
    };
    assert_eq!(symbol("cuMemAlloc", 2_000, 0, 12_090), Ok("cuMemAlloc"));
    assert_eq!(symbol("cuMemAlloc", 12_090, 0, 12_090), Ok("cuMemAlloc_v2"));
    assert_eq!(symbol("cuCtxCreate", 13_000, 0, 13_000), Ok("cuCtxCreate_v4"));
    assert_eq!(symbol("cuCtxCreate", 13_000, 0, 12_040), Ok("cuCtxCreate_v3"));
    assert_eq!(symbol("cuCtxCreate", 12_040, 0, 12_090), Ok("cuCtxCreate_v3"));
    assert_eq!(symbol("cuMemcpyHtoD", 7_000, 2, 12_090), Ok("cuMemcpyHtoD_v2_ptds"));
    assert_eq!(
        symbol("cuStreamGetCaptureInfo", 12_030, 2, 12_090),
        Ok("cuStreamGetCaptureInfo_v3_ptsz")
    );
    assert_eq!(symbol("", 0, 0, 11_070), Ok("cuGetProcAddress"));
    assert_eq!(symbol("cuDeviceGet", 12_000, 2, 12_090), Ok("cuDeviceGet"), "no per-thread form");
    assert_eq!(symbol("cuMemAllocAsync", 11_000, 0, 12_090), Err(Missing::TooNew));
    assert_eq!(symbol("cuNoSuchThing", 12_090, 0, 12_090), Err(Missing::NoSuchName));
    assert_eq!(symbol("cuGraphAddNode", 12_030, 0, 11_040), Err(Missing::NoSuchName));
}

#[test]
fn every_function_has_a_class() {
    let known: BTreeSet<_> = TABLE.iter().map(|symbol| symbol.base.text).collect();
    let mut classified = BTreeSet::new();
    for entry in CLASSES {
        assert!(classified.insert(entry.base), "{} is twice in classes.txt", entry.base);
    }
    let unseen: Vec<_> = known.difference(&classified).collect();
    assert!(unseen.is_empty(), "give these a class in classes.txt: {unseen:?}");
    let unknown: Vec<_> = classified.difference(&known).collect();
    assert!(unknown.is_empty(), "no CUDA release has these of classes.txt: {unknown:?}");
    let groups = CLASSES.chunk_by(|one, other| one.why == other.why);
    for group in groups {
        assert!(group.is_sorted_by_key(|entry| entry.base), "unsorted: {}", group[0].why);
    }
}
