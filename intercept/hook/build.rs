//! Names the library, and leaves out the C start-up code where it is built as it ships: it has nothing to start.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libtessera_intercept.so");
    // What it calls in itself is its own, whatever else is preloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rustc-cdylib-link-arg=-nostartfiles");
}
