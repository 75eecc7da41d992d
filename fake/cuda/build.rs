//! Names the library as NVIDIA's is named, and writes what follows from the table of symbols: a stub for every function that
//! the sources do not define, the variants for the per-thread default stream, and the table behind `cuGetProcAddress`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // As in NVIDIA's library: what it calls in itself is its own, whatever is preloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed=src");
    let table = fs::read_to_string("src/symbols.txt").expect("src/symbols.txt is readable");
    let rows: Vec<Row<'_>> = table.lines().filter(|line| !line.starts_with('#')).map(Row::parse).collect();
    let defined = defined_functions(Path::new("src"));
    let mut code = String::new();
    for row in rows.iter().filter(|row| !defined.contains(row.symbol)) {
        row.write_function(&defined, &mut code);
    }
    write_table(&rows, &mut code);
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("symbols.rs"), code).expect("OUT_DIR is writable");
}

struct Row<'a> {
    base: &'a str,
    version: u32,
    per_thread: Option<&'a str>,
    symbol: &'a str,
}

impl<'a> Row<'a> {
    fn parse(line: &'a str) -> Self {
        let fields: Vec<&str> = line.split(' ').collect();
        let [base, version, variant, symbol] = fields[..] else { panic!("not four fields: {line}") };
        let version = version.parse().expect("a version is a number");
        Self { base, version, per_thread: (variant != "-").then_some(variant), symbol }
    }

    /// A jump to the function proper where there is one (in here, the per-thread default stream is the default stream), else
    /// a stub. A function that is given more arguments than it knows ignores them.
    fn write_function(&self, defined: &BTreeSet<String>, code: &mut String) {
        let suffix = self.per_thread.map(|variant| format!("_{variant}"));
        let proper = suffix.and_then(|suffix| self.symbol.strip_suffix(&suffix));
        let symbol = self.symbol;
        match proper.filter(|proper| defined.contains(*proper)) {
            Some(proper) => writeln!(
                code,
                "#[unsafe(no_mangle)]\n#[unsafe(naked)]\nextern \"C\" fn {symbol}() {{\n    \
                 crate::abi::jump_to!(\"{proper}\")\n}}"
            ),
            None => writeln!(
                code,
                "#[unsafe(no_mangle)]\nextern \"C\" fn {symbol}() -> crate::abi::Return {{ crate::abi::not_supported() }}"
            ),
        }
        .expect("writing to a string cannot fail");
    }
}

fn write_table(rows: &[Row<'_>], code: &mut String) {
    code.push_str("pub(crate) static TABLE: &[crate::resolve::Entry] = &[\n");
    for Row { base, version, per_thread, symbol } in rows {
        let per_thread = per_thread.is_some();
        writeln!(
            code,
            "    crate::resolve::Entry {{ base: \"{base}\", version: {version}, per_thread: {per_thread}, \
             function: {{ unsafe extern \"C\" {{ fn {symbol}(); }} {symbol} }} }},"
        )
        .expect("writing to a string cannot fail");
    }
    code.push_str("];\n");
}

/// Every `fn cu...` in the sources.
fn defined_functions(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(directory).expect("src is readable").flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            let source = fs::read_to_string(&path).expect("a source file is readable");
            let names = source.lines().filter_map(|line| Some(line.split_once("fn cu")?.1));
            found.extend(names.filter_map(|rest| Some(format!("cu{}", rest.split_once('(')?.0))));
        }
    }
    found
}
