//! Which hook stands before which function of the driver.

use core::ffi::{CStr, c_int};
use core::sync::atomic::{AtomicUsize, Ordering};

use tessera_intercept_symbols as symbols;
use tessera_intercept_symbols::{Class, Symbol};

use crate::elf::Library;

/// The library that a function is of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    Cuda,
    Nvml,
}

impl Of {
    pub(crate) fn soname(self) -> &'static [u8] {
        match self {
            Self::Cuda => b"libcuda.so.",
            Self::Nvml => b"libnvidia-ml.so.",
        }
    }

    /// Where the library was when functions were last looked up in it.
    fn last_base(self) -> &'static AtomicUsize {
        static CUDA: AtomicUsize = AtomicUsize::new(0);
        static NVML: AtomicUsize = AtomicUsize::new(0);
        match self {
            Self::Cuda => &CUDA,
            Self::Nvml => &NVML,
        }
    }
}

/// A function of the driver and the hook that stands before it.
pub(crate) struct Route {
    /// The library.
    pub(crate) of: Of,
    /// The name it is exported under.
    pub(crate) symbol: &'static CStr,
    /// The name that `cuGetProcAddress` knows it by, and the CUDA version that brought this form
    /// of it; 0 for NVML.
    pub(crate) base: &'static CStr,
    /// See `base`.
    pub(crate) version: c_int,
    /// It is the form for the per-thread default stream.
    pub(crate) per_thread: bool,
    /// What the function means to the interceptor.
    pub(crate) class: Class,
    /// The hook.
    pub(crate) hook: Hook,
    /// The real function by its symbol; 0 = not looked up yet.
    real: AtomicUsize,
}

/// The address of a hook.
pub(crate) struct Hook(pub(crate) *const ());

// SAFETY: the address of a function; nothing is written through it.
unsafe impl Sync for Hook {}

impl Route {
    /// The route to a function; nothing is looked up yet. `sizes` are those of the hook's
    /// parameters: a hook that does not take what the function takes does not compile.
    pub(crate) const fn new(function: Symbol, sizes: &[usize], hook: Hook) -> Self {
        assert!(
            takes(function.parameters.as_bytes(), sizes),
            "the hook does not take what the function takes"
        );
        let of = match function.library() {
            symbols::Library::Cuda => Of::Cuda,
            symbols::Library::Nvml => Of::Nvml,
        };
        Self {
            of,
            symbol: function.symbol.c,
            base: function.base.c,
            version: function.version.0.cast_signed(),
            per_thread: function.variant.is_some(),
            class: symbols::class_of(function.base.text).expect("every function has a class").class,
            hook,
            real: AtomicUsize::new(0),
        }
    }

    /// The address of the real function; `None` where the library is not loaded or has no such
    /// function.
    pub(crate) fn real(&self) -> Option<usize> {
        match self.real.load(Ordering::Acquire) {
            0 => self.look_up(),
            known => Some(known),
        }
    }

    /// Gives back by the real function what the driver gave in vain.
    ///
    /// # Safety
    /// The function takes one handle, be it a pointer or a number, and this is one that nobody
    /// uses.
    pub(crate) unsafe fn give_back(&self, handle: u64) {
        type Real = unsafe extern "C" fn(u64) -> c_int;
        if let Some(address) = self.real() {
            // SAFETY: by this function's contract; pointers are passed as numbers of their size
            // are.
            unsafe { core::mem::transmute::<usize, Real>(address)(handle) };
        }
    }

    /// Looks the function up in the library as it is loaded now: programs close libraries and open
    /// them again.
    pub(crate) fn look_up(&self) -> Option<usize> {
        let library = Library::driver(self.of)?;
        // The base is published last: a thread that sees the new base sees no old address.
        if self.of.last_base().load(Ordering::Acquire) != library.base() {
            all().filter(|route| route.of == self.of).for_each(Self::forget);
            crate::cuda::forget_helpers();
            self.of.last_base().store(library.base(), Ordering::Release);
        }
        let real = library.function(self.symbol)?;
        self.real.store(real, Ordering::Release);
        Some(real)
    }

    /// Forgets where the function was in a library that was unloaded.
    fn forget(&self) {
        self.real.store(0, Ordering::Release);
    }
}

/// Whether parameters of those sizes are passed as the table says.
const fn takes(parameters: &[u8], sizes: &[usize]) -> bool {
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

/// All routes.
pub(crate) fn all() -> impl Iterator<Item = &'static Route> {
    let groups: [&'static [&'static Route]; 18] = [
        crate::memory::ROUTES,
        crate::pool::ROUTES,
        crate::vmm::ROUTES,
        crate::array::ROUTES,
        crate::bind::ROUTES,
        crate::import::ROUTES,
        crate::module::ROUTES,
        crate::graph::ROUTES,
        crate::context::ROUTES,
        crate::info::ROUTES,
        crate::limit::ROUTES,
        crate::wait::ROUTES,
        crate::launch::ROUTES,
        crate::nvml::ROUTES,
        crate::capture::ROUTES,
        crate::processes::ROUTES,
        crate::utilization::ROUTES,
        crate::resolve::ROUTES,
    ];
    groups.into_iter().flatten().copied()
}

/// Defines hooks: in the preload library, exported under the name of the driver's function, with
/// the real one at hand. What form of which function that is, the table of symbols says. A hook
/// whose real function is not there answers what its library answers for that.
macro_rules! hooks {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$real:ident| $body:block)*) => {
        $(
            #[expect(non_snake_case, reason = "called what the function is called")]
            mod $name {
                use super::*;

                pub(super) static ROUTE: $crate::route::Route = $crate::route::Route::new(
                    const { tessera_intercept_symbols::get(stringify!($name)) },
                    &[$(size_of::<$type>()),*],
                    $crate::route::Hook($name as *const ()),
                );

                // A proxy exports every function of its library in a way of its own.
                #[cfg_attr(artefact = "preload", unsafe(no_mangle))]
                unsafe extern "C" fn $name($($argument: $type),*) -> core::ffi::c_int {
                    type Real = unsafe extern "C" fn($($type),*) -> core::ffi::c_int;
                    let Some(address) = ROUTE.real() else { return $crate::cuda::absent(ROUTE.of) };
                    // SAFETY: the address is that of the function with this name, whose type this is.
                    let $real: Real = unsafe { core::mem::transmute::<usize, Real>(address) };
                    $body
                }
            }
        )*

        /// The routes of this module.
        pub(crate) static ROUTES: &[&$crate::route::Route] = &[$(&$name::ROUTE),*];
    };
}
pub(crate) use hooks;
