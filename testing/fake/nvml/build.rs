//! Sets the soname of NVIDIA's library, and generates stubs for the NVML functions that the sources
//! do not define.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use tessera_intercept_symbols::{Library, TABLE};

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rerun-if-changed=src");
    let defined = defined_functions(Path::new("src"));
    let mut stubs = String::new();
    let nvml = TABLE.iter().filter(|symbol| symbol.library() == Library::Nvml);
    for name in nvml.map(|symbol| symbol.symbol.text).filter(|name| !defined.contains(*name)) {
        // By the C calling conventions of Linux a function ignores arguments that it does not
        // declare.
        writeln!(
            stubs,
            "#[unsafe(no_mangle)]\nextern \"C\" fn {name}() -> crate::abi::Return {{ crate::abi::not_supported() }}"
        )
        .expect("writing to a string cannot fail");
    }
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("stubs.rs"), stubs).expect("OUT_DIR is writable");
}

/// Returns the names of all functions `fn nvml...` in the sources.
fn defined_functions(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(directory).expect("src is readable").flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let source = fs::read_to_string(&path).expect("a source file is readable");
            let names = source.lines().filter_map(|line| Some(line.split_once("fn nvml")?.1));
            found.extend(names.filter_map(|rest| Some(format!("nvml{}", rest.split_once('(')?.0))));
        }
    }
    found
}
