//! Build scripts of the interceptor's libraries: linker options and exports.
//!
//! Each function prints instructions for cargo, and writes `exports.rs` into `OUT_DIR`.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use tessera_intercept_symbols::{Library, Symbol, TABLE, class_of};

/// Directory of the real libraries in containers with proxies.
const REAL_DIRECTORY: &str = "/usr/local/lib/tessera/driver";

/// Configures the preload library: `exports.rs` calls the macro `exports` with the names of all
/// hooks.
///
/// # Panics
/// Panics outside of a build script, or if `OUT_DIR` is not writable.
pub fn preload(soname: &str) {
    link(soname);
    let is_hooked = |symbol: &&Symbol| {
        class_of(symbol.base.text).is_some_and(|classified| classified.class.is_hooked())
    };
    let mut code = String::from("exports! {\n");
    for symbol in TABLE.iter().filter(is_hooked) {
        writeln!(code, "    {},", symbol.symbol).expect("writing to a string cannot fail");
    }
    code.push_str("}\n");
    write_exports(&code);
}

/// Configures a proxy: `exports.rs` calls the macro `exports` with all functions of its library,
/// and the proxy depends on the real library at its private path.
///
/// # Panics
/// As [`preload`], or if the linker fails.
pub fn proxy(soname: &str, library: Library) {
    link(soname);
    // Charges belong to the process: the library stays when a program closes the driver.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--no-as-needed");
    println!("cargo::rustc-cdylib-link-arg={}", link_real(soname).display());
    let names = || TABLE.iter().filter(|symbol| symbol.library() == library);
    let mut code = format!("exports! {{ {}:\n", names().count());
    for (index, name) in names().map(|symbol| symbol.symbol).enumerate() {
        writeln!(code, "    {index} {name} c\"{name}\",").expect("writing to a string cannot fail");
    }
    code.push_str("}\n");
    write_exports(&code);
}

fn link(soname: &str) {
    // Calls within the library are bound to its own functions, whatever else is preloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-nostartfiles");
    // A proxy writes to its symbol table: its pages must not contain code. Linkers for aarch64 do
    // not separate them by default.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,separate-code");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{soname}");
}

fn out_directory() -> PathBuf {
    env::var_os("OUT_DIR").expect("cargo sets OUT_DIR").into()
}

fn write_exports(code: &str) {
    fs::write(out_directory().join("exports.rs"), code).expect("OUT_DIR is writable");
}

/// Links an empty library whose soname is the path of the real one: the linker records it as a
/// dependency.
fn link_real(soname: &str) -> PathBuf {
    let file = out_directory().join("libreal.so");
    let linker = env::var_os("RUSTC_LINKER").unwrap_or_else(|| OsString::from("cc"));
    let status = Command::new(&linker)
        .args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-x", "none", "-o"])
        .arg(&file)
        .arg(format!("-Wl,-soname,{}", Path::new(REAL_DIRECTORY).join(soname).display()))
        .status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "`{}` cannot link an empty library",
        linker.display()
    );
    file
}
