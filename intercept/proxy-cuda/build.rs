//! Linker options and exports of the proxy.

use tessera_intercept_symbols::Library;

fn main() {
    tessera_intercept_linking::proxy("libcuda.so.1", Library::Cuda);
}
