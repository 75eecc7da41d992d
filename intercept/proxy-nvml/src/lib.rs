//! Proxy: the interceptor in the place of `libnvidia-ml.so.1`.
#![cfg_attr(panic = "abort", no_std)]

/// Defines the exports.
macro_rules! exports {
    ($($argument:tt)*) => {
        tessera_intercept_hook::proxy! { Nvml, $($argument)* }
    };
}

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

#[cfg(panic = "abort")]
#[panic_handler]
fn panicked(_: &core::panic::PanicInfo<'_>) -> ! {
    tessera_intercept_hook::abort()
}
