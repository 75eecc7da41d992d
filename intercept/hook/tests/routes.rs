//! A program finds the hooks by every kind of lookup.

mod container;

use std::fs;

use container::{GIB, Mode, Node, containers_available, libraries, set_up};
use serde_json::json;
use tessera_intercept_symbols::{
    Library, PER_THREAD_STREAM, RELEASES, Symbol, SymbolVersion, TABLE, resolve,
};
use tessera_test_support::data::{ProcQuery, proc_queries};
use tessera_test_support::test_name;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const REFUSED: i64 = 2;

#[test]
fn every_lookup_of_driver_functions_is_limited() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let container = node.container(&[&node.share("claim-0", 0, GIB)]);
    let path = libraries().join("libcuda.so.1");
    let path = path.to_str().expect("text");
    for linked in [false, true] {
        let lines = container.run_c("routes", linked, &[path]);
        assert_eq!(lines.len(), if linked { 12 } else { 10 });
        for line in lines {
            assert_eq!(line["result"], REFUSED, "{line}, linked: {linked}");
        }
    }
}

#[test]
fn same_lookups_are_unlimited_container_without_library() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let path = libraries().join("libcuda.so.1");
    let lines =
        node.container_without_library().run_c("routes", true, &[path.to_str().expect("text")]);
    assert!(lines.iter().all(|line| line["result"] == 0), "{lines:?}");
}

#[test]
fn grant_applies_with_an_empty_environment() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let container = node.container(&[&node.share("claim-0", 0, GIB)]);
    let world = format!("TESSERA_FAKE_WORLD={}", node.path().join("world.yaml").display());
    let cuda = libraries().join("libcuda.so.1");
    let nvml = libraries().join("libnvidia-ml.so.1");
    let arguments = [
        "-i",
        &world,
        container::probe().to_str().expect("text"),
        "fill",
        "--cuda",
        cuda.to_str().expect("text"),
        "--nvml",
        nvml.to_str().expect("text"),
    ];
    let lines = container::lines_of(&container.run("env", &arguments));
    assert_eq!(lines[1]["takenBytes"], GIB, "{lines:?}");
}

/// Arguments of `cuGetProcAddress`: name, version, flags.
type Query = (String, SymbolVersion, u64);

/// Returns a query for each version of each function of each release, and those of a CUDA runtime.
fn queries() -> Vec<Query> {
    /// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`
    const LEGACY_STREAM: u64 = 1;
    let cuda = TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda);
    let of_form = |form: &Symbol| {
        let flags = form.variant.map_or(LEGACY_STREAM, |_| PER_THREAD_STREAM);
        (form.base.text.to_owned(), form.version, flags)
    };
    let of_runtime = |query: ProcQuery| (query.name, SymbolVersion(query.version), query.flags);
    cuda.map(of_form).chain(proc_queries().into_iter().map(of_runtime)).collect()
}

/// Returns the symbol that a driver finds for each query, or `-`.
fn answers(queries: &[Query], driver: SymbolVersion) -> Vec<&'static str> {
    let answers =
        queries.iter().map(|(name, version, flags)| resolve(name, *version, *flags, driver));
    answers.map(|found| found.map_or("-", |symbol| symbol.symbol.text)).collect()
}

fn ask_every_query(queries: &[Query], driver: SymbolVersion, mode: Mode) {
    let answers = answers(queries, driver);
    let line = |((name, version, flags), symbol): (&Query, &&str)| {
        let name = if name.is_empty() { "." } else { name };
        format!("{name} {} {flags} {symbol}\n", version.0)
    };
    let node = Node::with_cuda(driver);
    let table = node.path().join("queries.txt");
    fs::write(&table, queries.iter().zip(&answers).map(line).collect::<String>()).expect("written");
    let container = node.container_in(mode, &[&node.share("claim-0", 0, GIB)]);
    let [table, real] =
        [table, mode.real_cuda()].map(|path| path.to_str().expect("text").to_owned());
    let lines = container.run_c("queries", false, &[&table, &real]);
    assert_eq!(lines[0]["wrong"], 0, "{mode:?}, CUDA {driver}: {:?}", &lines[1..]);
    assert_eq!(lines[0]["queries"], queries.len(), "{mode:?}, CUDA {driver}");
    let is_hooked = |symbol: &&&str| mode != Mode::Bare && container::exported().contains(**symbol);
    let hooks = answers.iter().filter(is_hooked).count();
    assert_eq!(
        lines[0]["hooked"], hooks,
        "{mode:?}, CUDA {driver}: every hook is handed out, and nothing else"
    );
}

#[test]
fn cugetprocaddress_is_exact_for_every_driver_version() {
    if !containers_available(test_name!()) {
        return;
    }
    let queries = queries();
    for driver in [SymbolVersion(11_040)].iter().chain(RELEASES) {
        ask_every_query(&queries, *driver, Mode::Preload);
    }
}

#[test]
fn cugetprocaddress_is_exact_in_every_mode() {
    if !containers_available(test_name!()) {
        return;
    }
    let queries = queries();
    for mode in [Mode::Bare, Mode::Proxy, Mode::Both] {
        for driver in [11_040, 12_090, 13_050].map(SymbolVersion) {
            ask_every_query(&queries, driver, mode);
        }
    }
}

/// Programs detect features by the functions that `dlsym` finds.
#[test]
fn dlsym_finds_only_functions_of_the_driver() {
    if !containers_available(test_name!()) {
        return;
    }
    let cuda = TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda);
    let names: Vec<_> = cuda.map(|symbol| symbol.symbol).collect();
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    for driver in [11_040, 12_090, 13_050].map(SymbolVersion) {
        let node = Node::with_cuda(driver);
        let file = node.path().join("names.txt");
        fs::write(&file, &text).expect("written");
        let missing = |mode| {
            let container = node.container_in(mode, &[&node.share(&format!("{mode:?}"), 0, GIB)]);
            container.run_c("names", false, &[file.to_str().expect("text")])
        };
        let bare = missing(Mode::Bare);
        let expected = TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda);
        let expected = expected.filter(|symbol| !symbol.is_exported_by(driver)).count();
        // The last line ends the list.
        assert_eq!(bare.len(), expected + 1, "CUDA {driver}");
        for mode in Mode::INTERCEPTED {
            assert_eq!(missing(mode), bare, "{mode:?}, CUDA {driver}");
        }
    }
}

/// Each run is a new process, in which no address was learnt before.
#[test]
fn threads_that_resolve_at_once_find_every_function() {
    const RUNS: u32 = 300;
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let container = node.container(&[&node.share("claim-0", 0, GIB)]);
    let lines = container.run_c("resolving", false, &[&RUNS.to_string()]);
    assert_eq!(lines[0], json!({"runs": RUNS, "failed": 0}));
}
