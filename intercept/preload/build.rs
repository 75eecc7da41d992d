//! Linker options and exports of the preload library.

fn main() {
    tessera_intercept_linking::preload("libtessera_intercept.so");
}
