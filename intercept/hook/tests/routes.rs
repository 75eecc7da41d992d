//! Whatever way a program finds the driver's functions, it finds the hooks.

mod container;

use std::fs;

use container::{GIB, Mode, Node, can_contain, libraries};
use tessera_intercept_symbols::{
    Library, PER_THREAD_STREAM, RELEASES, Symbol, TABLE, Version, resolve,
};
use tessera_test_support::data::{ProcQuery, proc_queries};

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const REFUSED: i64 = 2;

#[test]
fn every_route_to_the_driver_is_held_to_the_grant() {
    if !can_contain("every_route_to_the_driver_is_held_to_the_grant") {
        return;
    }
    let node = Node::new();
    let container = node.contain(&[&node.share("claim-0", 0, GIB)]);
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
fn without_the_library_the_same_routes_are_open() {
    if !can_contain("without_the_library_the_same_routes_are_open") {
        return;
    }
    let node = Node::new();
    let path = libraries().join("libcuda.so.1");
    let lines = node.without_the_library().run_c("routes", true, &[path.to_str().expect("text")]);
    assert!(lines.iter().all(|line| line["result"] == 0), "{lines:?}");
}

#[test]
fn an_emptied_environment_changes_nothing() {
    if !can_contain("an_emptied_environment_changes_nothing") {
        return;
    }
    let node = Node::new();
    let container = node.contain(&[&node.share("claim-0", 0, GIB)]);
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

/// What a program can ask `cuGetProcAddress` for: name, version, flags.
type Query = (String, Version, u64);

/// A query for each form of each function of each release, and then those of a CUDA runtime.
fn queries() -> Vec<Query> {
    /// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`
    const LEGACY_STREAM: u64 = 1;
    let cuda = TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda);
    let of_form = |form: &Symbol| {
        let flags = form.variant.map_or(LEGACY_STREAM, |_| PER_THREAD_STREAM);
        (form.base.text.to_owned(), form.version, flags)
    };
    let of_runtime = |query: ProcQuery| (query.name, Version(query.version), query.flags);
    cuda.map(of_form).chain(proc_queries().into_iter().map(of_runtime)).collect()
}

/// The answers of a driver: for each query the symbol, or `-`.
fn answers(queries: &[Query], driver: Version) -> Vec<&'static str> {
    let answers =
        queries.iter().map(|(name, version, flags)| resolve(name, *version, *flags, driver));
    answers.map(|found| found.map_or("-", |symbol| symbol.symbol.text)).collect()
}

fn ask_every_query(queries: &[Query], driver: Version, mode: Mode) {
    let answers = answers(queries, driver);
    let line = |((name, version, flags), symbol): (&Query, &&str)| {
        let name = if name.is_empty() { "." } else { name };
        format!("{name} {} {flags} {symbol}\n", version.0)
    };
    let node = Node::with_cuda(driver);
    let table = node.path().join("queries.txt");
    fs::write(&table, queries.iter().zip(&answers).map(line).collect::<String>()).expect("written");
    let container = node.contain_in(mode, &[&node.share("claim-0", 0, GIB)]);
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
fn every_query_at_every_version_gets_the_form_that_it_asks_for() {
    if !can_contain("every_query_at_every_version_gets_the_form_that_it_asks_for") {
        return;
    }
    let queries = queries();
    for driver in [Version(11_040)].iter().chain(RELEASES) {
        ask_every_query(&queries, *driver, Mode::Preload);
    }
}

#[test]
fn every_query_gets_the_same_form_wherever_the_interceptor_stands() {
    if !can_contain("every_query_gets_the_same_form_wherever_the_interceptor_stands") {
        return;
    }
    let queries = queries();
    for mode in [Mode::Bare, Mode::Proxy, Mode::Both] {
        for driver in [11_040, 12_090, 13_050].map(Version) {
            ask_every_query(&queries, driver, mode);
        }
    }
}

/// Programs decide by what `dlsym` finds what they can use.
#[test]
fn dlsym_finds_what_the_driver_has_and_nothing_newer() {
    if !can_contain("dlsym_finds_what_the_driver_has_and_nothing_newer") {
        return;
    }
    let cuda = TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda);
    let names: Vec<_> = cuda.map(|symbol| symbol.symbol).collect();
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    for driver in [11_040, 12_090, 13_050].map(Version) {
        let node = Node::with_cuda(driver);
        let file = node.path().join("names.txt");
        fs::write(&file, &text).expect("written");
        let missing = |mode| {
            let container = node.contain_in(mode, &[&node.share(&format!("{mode:?}"), 0, GIB)]);
            container.run_c("names", false, &[file.to_str().expect("text")])
        };
        let bare = missing(Mode::Bare);
        let expected = TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda);
        let expected = expected.filter(|symbol| !symbol.is_exported_by(driver)).count();
        // One line more, that ends it.
        assert_eq!(bare.len(), expected + 1, "CUDA {driver}");
        for mode in Mode::HELD {
            assert_eq!(missing(mode), bare, "{mode:?}, CUDA {driver}");
        }
    }
}
