//! Which of the three libraries this is: the sources are the same, and a package for each has them
//! built in its own way.
//!
//! Names the library, leaves out the C start-up code where it is built as it ships, and gives a
//! proxy what makes it one: an export for every function of the library that it stands in for, and
//! the need for the real one at its private path.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use tessera_intercept_symbols::{Library, TABLE};

/// Where the real libraries are in a container that the proxies are in.
const REAL_DIRECTORY: &str = "/usr/local/lib/tessera/driver";

fn main() {
    println!("cargo::rustc-check-cfg=cfg(artefact, values(\"preload\", \"cuda\", \"nvml\"))");
    // A feature of the preload library only.
    println!("cargo::rustc-check-cfg=cfg(feature, values(\"hami\"))");
    // What it calls in itself is its own, whatever else is preloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-nostartfiles");
    // A proxy writes to its table of symbols, on whose pages no code may lie. On aarch64 that is
    // not what a linker does by itself.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,separate-code");
    let package = env::var("CARGO_PKG_NAME").expect("cargo sets CARGO_PKG_NAME");
    match package.as_str() {
        "tessera-intercept-cuda" => proxy("cuda", "libcuda.so.1", Library::Cuda),
        "tessera-intercept-nvml" => proxy("nvml", "libnvidia-ml.so.1", Library::Nvml),
        _ => name("preload", "libtessera_intercept.so"),
    }
}

fn name(artefact: &str, soname: &str) {
    println!("cargo::rustc-cfg=artefact=\"{artefact}\"");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{soname}");
}

fn proxy(artefact: &str, soname: &str, library: Library) {
    name(artefact, soname);
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let out = Path::new(&out);
    // Charges belong to the process: what holds them does not go when a program closes the driver.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--no-as-needed");
    println!("cargo::rustc-cdylib-link-arg={}", stand_in_for_the_real(soname, out).display());
    let names: Vec<_> = TABLE
        .iter()
        .filter(|symbol| symbol.library() == library)
        .map(|symbol| symbol.symbol)
        .collect();
    let mut code = format!("exports! {{ {}:\n", names.len());
    for (index, name) in names.iter().enumerate() {
        writeln!(code, "    {index} {name} c\"{name}\",").expect("writing to a string cannot fail");
    }
    code.push_str("}\n");
    fs::write(out.join("exports.rs"), code).expect("OUT_DIR is writable");
}

/// A library without content whose name is the path of the real one: the linker writes down that
/// this is needed.
fn stand_in_for_the_real(soname: &str, out: &Path) -> std::path::PathBuf {
    let file = out.join("libreal.so");
    let linker = env::var_os("RUSTC_LINKER").unwrap_or_else(|| OsString::from("cc"));
    let status = Command::new(&linker)
        .args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-x", "none", "-o"])
        .arg(&file)
        .arg(format!("-Wl,-soname,{REAL_DIRECTORY}/{soname}"))
        .status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "`{}` cannot link an empty library",
        linker.display()
    );
    file
}
