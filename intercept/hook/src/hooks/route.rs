//! Routes: a hook and the driver function that it replaces.

use core::ffi::{CStr, c_int};

use tessera_intercept_symbols as symbols;
use tessera_intercept_symbols::{Class, Library, Symbol};

use crate::driver::Function;

/// A driver function and its hook.
pub(crate) struct Route {
    /// The function.
    pub(crate) function: Function,
    /// The name for `cuGetProcAddress`.
    pub(crate) base: &'static CStr,
    /// The CUDA version that introduced this form of the function; 0 for NVML.
    pub(crate) version: c_int,
    /// True for the form for the per-thread default stream.
    pub(crate) per_thread: bool,
    /// Class of the function.
    pub(crate) class: Class,
    hook: Hook,
}

/// Address of a hook.
pub(crate) struct Hook(pub(crate) *const ());

// SAFETY: the address of a function; nothing is written through it.
unsafe impl Sync for Hook {}

impl Route {
    /// Creates a route. `sizes` are those of the hook's parameters: a hook with other parameters
    /// than the function does not compile.
    pub(crate) const fn new(function: Symbol, sizes: &[usize], hook: Hook) -> Self {
        assert!(
            has_parameters(function.parameters.as_bytes(), sizes),
            "the hook has other parameters than the function"
        );
        Self {
            function: Function::new(function),
            base: function.base.c,
            version: function.version.0.cast_signed(),
            per_thread: function.variant.is_some(),
            class: symbols::class_of(function.base.text).expect("every function has a class").class,
            hook,
        }
    }

    /// Returns the library of the function.
    pub(crate) const fn library(&self) -> Library {
        self.function.library()
    }

    /// Returns the address of the hook.
    pub(crate) fn hook(&self) -> usize {
        self.hook.0 as usize
    }
}

/// Returns true if parameters of these sizes are passed as the table says.
const fn has_parameters(parameters: &[u8], sizes: &[usize]) -> bool {
    let mut same = parameters.len() == sizes.len();
    let mut at = 0;
    while same && at < sizes.len() {
        same = match parameters[at] {
            b'p' | b'h' | b'l' => sizes[at] == 8,
            b'i' | b'f' => sizes[at] <= 4,
            _ => true,
        };
        at += 1;
    }
    same
}

/// Defines hooks. `real` is the driver's function. The table of symbols says which form of which
/// function it is. A hook whose function the driver does not have returns the library's error for
/// that.
macro_rules! hooks {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$real:ident| $body:block)*) => {
        $(
            #[expect(non_snake_case, reason = "the name of the driver's function")]
            mod $name {
                use super::*;

                pub(super) static ROUTE: $crate::hooks::Route = $crate::hooks::Route::new(
                    const { tessera_intercept_symbols::get(stringify!($name)) },
                    &[$(size_of::<$type>()),*],
                    $crate::hooks::Hook($name as *const ()),
                );

                #[doc = concat!("Hook of `", stringify!($name), "`.")]
                ///
                /// # Safety
                /// As the driver's function.
                pub unsafe extern "C" fn $name($($argument: $type),*) -> core::ffi::c_int {
                    type Real = unsafe extern "C" fn($($type),*) -> core::ffi::c_int;
                    let Some(address) = ROUTE.function.address() else {
                        return $crate::driver::absent(ROUTE.library());
                    };
                    // SAFETY: the address is that of the function with this name and type.
                    let $real: Real = unsafe { core::mem::transmute::<usize, Real>(address) };
                    $body
                }
            }
        )*

        /// Routes of this module.
        pub(super) static ROUTES: &[&$crate::hooks::Route] = &[$(&$name::ROUTE),*];

        /// Hooks of this module, by the names of their functions.
        pub(super) mod entries {
            $(pub use super::$name::$name;)*
        }
    };
}
pub(super) use hooks;
