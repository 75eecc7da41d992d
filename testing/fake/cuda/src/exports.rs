//! Symbols that `dlsym` finds: those of a driver of the world's CUDA version, and one more.

use std::ffi::c_int;

use tessera_fake_world::{Location, World};
use tessera_intercept_symbols::{SymbolVersion, find};

/// A function that no symbol table lists, as in a driver that is newer than all tables.
pub(crate) const UNLISTED_FUNCTION: &str = "cuFunctionOfTomorrow";

/// The CUDA version from which on every function has one more form than all tables list: a driver
/// of a future release.
pub(crate) const FUTURE_RELEASE: SymbolVersion = SymbolVersion(99_000);

/// See [`UNLISTED_FUNCTION`] and [`FUTURE_RELEASE`].
#[unsafe(export_name = "cuFunctionOfTomorrow")]
pub(crate) extern "C" fn unlisted_function() -> c_int {
    0
}

/// Hides the symbols that the world's driver is too old for. If there is no world, all symbols are
/// found, and their functions return an error.
extern "C" fn hide_newer_symbols() {
    let world = Location::of_this_process()
        .ok()
        .and_then(|place| std::fs::read_to_string(place.world).ok());
    let world = world.and_then(|text| World::parse(&text, "the world").ok());
    let Some(number) = world.and_then(|world| world.driver.cuda_number().try_into().ok()) else {
        return;
    };
    let is_too_new = |name: &std::ffi::CStr| {
        let symbol = name.to_str().ok().and_then(find);
        symbol.is_some_and(|symbol| !symbol.is_exported_by(SymbolVersion(number)))
    };
    // SAFETY: the loader initialises this library, during which no symbols are looked up.
    let hidden =
        unsafe { tessera_intercept_exports::hide(hide_newer_symbols as *const (), is_too_new) };
    if let Err(error) = hidden {
        eprintln!("fake libcuda.so.1: cannot hide newer functions: {error:?}");
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static INITIALISER: extern "C" fn() = hide_newer_symbols;
