//! Sets the library's soname to NVIDIA's and generates code from the symbol table: a stub for every
//! function that the sources do not define, the variants for the per-thread default stream, and the
//! addresses for `cuGetProcAddress`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use tessera_intercept_symbols::{Library, Symbol, TABLE};

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // As in NVIDIA's library: internal calls are not redirected by preloaded libraries.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed=src");
    let table: Vec<&Symbol> =
        TABLE.iter().filter(|symbol| symbol.library() == Library::Cuda).collect();
    let defined = defined_functions(Path::new("src"));
    let known = |name: &String| table.iter().any(|symbol| symbol.symbol.text == *name);
    assert!(defined.iter().all(known), "no release of CUDA exports one of {defined:?}");
    let mut code = String::new();
    for symbol in table.iter().filter(|symbol| !defined.contains(symbol.symbol.text)) {
        write_function(symbol, &defined, &mut code);
    }
    write_addresses(&table, &mut code);
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("symbols.rs"), code).expect("OUT_DIR is writable");
}

/// Writes a jump to the base function if it exists, else a stub. The per-thread default stream is
/// the default stream here. A function ignores arguments that it does not declare.
fn write_function(symbol: &Symbol, defined: &BTreeSet<String>, code: &mut String) {
    let suffix = symbol.variant.map(|variant| format!("_{}", variant.name()));
    let symbol = symbol.symbol;
    let base = suffix.and_then(|suffix| symbol.text.strip_suffix(&suffix));
    match base.filter(|base| defined.contains(*base)) {
        Some(base) => writeln!(
            code,
            "#[unsafe(no_mangle)]\n#[unsafe(naked)]\nextern \"C\" fn {symbol}() {{\n    \
             crate::abi::jump_to!(\"{base}\")\n}}"
        ),
        None => writeln!(
            code,
            "#[unsafe(no_mangle)]\nextern \"C\" fn {symbol}() -> crate::abi::Return {{ crate::abi::not_supported(\"{symbol}\") }}"
        ),
    }
    .expect("writing to a string cannot fail");
}

/// Writes the addresses that `cuGetProcAddress` hands out: not those of the exported symbols, which
/// no document of NVIDIA promises to be the same.
fn write_addresses(table: &[&Symbol], code: &mut String) {
    let mut entries = String::new();
    code.push_str("#[allow(non_snake_case)]\nmod handed_out {\n");
    for symbol in table.iter().map(|symbol| symbol.symbol) {
        writeln!(
            code,
            "    #[unsafe(naked)]\n    pub(super) extern \"C\" fn {symbol}() {{ \
             crate::abi::jump_to!(\"{symbol}\") }}"
        )
        .expect("writing to a string cannot fail");
        writeln!(entries, "    (\"{symbol}\", handed_out::{symbol}),")
            .expect("writing to a string cannot fail");
    }
    code.push_str("}\npub(crate) static ADDRESSES: &[(&str, extern \"C\" fn())] = &[\n");
    code.push_str(&entries);
    code.push_str("];\n");
}

/// Returns the names of all functions `fn cuXyz` in the sources.
fn defined_functions(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(directory).expect("src is readable").flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let source = fs::read_to_string(&path).expect("a source file is readable");
            let names = source.lines().filter_map(|line| Some(line.split_once("fn cu")?.1));
            let names = names.filter(|rest| rest.starts_with(char::is_uppercase));
            found.extend(names.filter_map(|rest| Some(format!("cu{}", rest.split_once('(')?.0))));
        }
    }
    found
}
