//! Which functions `dlsym` finds: those of a driver of the world's CUDA version, and one more.

use std::ffi::c_int;

use tessera_fake_world::{Location, World};
use tessera_intercept_symbols::{Version, find};

/// A function that no release has: what a driver newer than everybody's tables has.
pub(crate) const OF_TOMORROW: &str = "cuFunctionOfTomorrow";

/// See [`OF_TOMORROW`].
#[unsafe(export_name = "cuFunctionOfTomorrow")]
pub(crate) extern "C" fn of_tomorrow() -> c_int {
    0
}

/// Hides what the world's driver is too old for. Where there is no world, everything is found, and
/// answers that there is none.
extern "C" fn hide_what_is_too_new() {
    let world = Location::of_this_process()
        .ok()
        .and_then(|place| std::fs::read_to_string(place.world).ok());
    let world = world.and_then(|text| World::parse(&text, "the world").ok());
    let Some(number) = world.and_then(|world| world.driver.cuda_number().try_into().ok()) else {
        return;
    };
    let is_too_new = |name: &std::ffi::CStr| {
        let symbol = name.to_str().ok().and_then(find);
        symbol.is_some_and(|symbol| !symbol.is_exported_by(Version(number)))
    };
    // SAFETY: the loader initialises this library, and lets nobody look symbols up meanwhile.
    let hidden =
        unsafe { tessera_intercept_exports::hide(hide_what_is_too_new as *const (), is_too_new) };
    if let Err(why) = hidden {
        eprintln!("fake libcuda.so.1: functions that are too new cannot be hidden: {why:?}");
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static WHEN_LOADED: extern "C" fn() = hide_what_is_too_new;
