//! `libtessera_intercept.so`: the interceptor, preloaded into every program of a container. It
//! exports the hooks under the names of the driver's functions, and `dlsym` and `dlvsym`.
#![cfg_attr(panic = "abort", no_std)]

/// Defines exports: jumps to the hooks of the same names.
macro_rules! exports {
    ($($name:ident,)*) => {
        $(
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            unsafe extern "C" fn $name() {
                jump_to!(tessera_intercept_hook::entries::$name)
            }
        )*
    };
}

/// Jumps to a function with all arguments.
macro_rules! jump_to {
    ($target:path) => {{
        #[cfg(target_arch = "x86_64")]
        core::arch::naked_asm!("jmp {target}", target = sym $target);
        #[cfg(target_arch = "aarch64")]
        core::arch::naked_asm!("b {target}", target = sym $target);
    }};
}

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlsym() {
    jump_to!(tessera_intercept_hook::loader::dlsym)
}

#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlvsym() {
    jump_to!(tessera_intercept_hook::loader::dlvsym)
}

#[cfg(panic = "abort")]
#[panic_handler]
fn panicked(_: &core::panic::PanicInfo<'_>) -> ! {
    tessera_intercept_hook::abort()
}
