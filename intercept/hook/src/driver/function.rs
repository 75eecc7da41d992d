//! Functions of the driver libraries, looked up at their first use.

use core::ffi::{CStr, c_int};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use tessera_intercept_symbols::{Library, Symbol};

use super::LoadedLibrary;

/// `CUDA_ERROR_NOT_FOUND`.
const CUDA_NOT_FOUND: c_int = 500;
/// `NVML_ERROR_FUNCTION_NOT_FOUND`.
const NVML_FUNCTION_NOT_FOUND: c_int = 13;

/// Returns the error of a library for a function that it does not have.
pub(crate) const fn absent(library: Library) -> c_int {
    match library {
        Library::Cuda => CUDA_NOT_FOUND,
        Library::Nvml => NVML_FUNCTION_NOT_FOUND,
    }
}

/// A function of a driver library, and its address once it was looked up.
pub(crate) struct Function {
    library: Library,
    symbol: &'static CStr,
    /// 0: not looked up.
    address: AtomicUsize,
    is_listed: AtomicBool,
    /// Next in the list of functions that were looked up.
    next: AtomicPtr<Function>,
}

/// State of a library in this process.
struct LibraryState {
    /// Base address when functions were last looked up.
    base: AtomicUsize,
    /// Functions that were looked up.
    first: AtomicPtr<Function>,
}

impl LibraryState {
    const fn new() -> Self {
        Self { base: AtomicUsize::new(0), first: AtomicPtr::new(ptr::null_mut()) }
    }

    fn of(library: Library) -> &'static Self {
        static CUDA: LibraryState = LibraryState::new();
        static NVML: LibraryState = LibraryState::new();
        match library {
            Library::Cuda => &CUDA,
            Library::Nvml => &NVML,
        }
    }

    /// Forgets all addresses if the library was loaded again at another base. The base is stored
    /// last: a thread that reads the new base reads no old address.
    fn update_base(&self, base: usize) {
        if self.base.load(Ordering::Acquire) == base {
            return;
        }
        let mut next = self.first.load(Ordering::Acquire);
        // SAFETY: the list has static functions only.
        while let Some(function) = unsafe { next.as_ref() } {
            function.address.store(0, Ordering::Release);
            next = function.next.load(Ordering::Acquire);
        }
        self.base.store(base, Ordering::Release);
    }

    fn add(&self, function: &'static Function) {
        let new = ptr::from_ref(function).cast_mut();
        let mut first = self.first.load(Ordering::Acquire);
        loop {
            function.next.store(first, Ordering::Release);
            match self.first.compare_exchange(first, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return,
                Err(other) => first = other,
            }
        }
    }
}

impl Function {
    /// Names a function; nothing is looked up.
    pub(crate) const fn new(symbol: Symbol) -> Self {
        Self {
            library: symbol.library(),
            symbol: symbol.symbol.c,
            address: AtomicUsize::new(0),
            is_listed: AtomicBool::new(false),
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Returns the library of the function.
    pub(crate) const fn library(&self) -> Library {
        self.library
    }

    /// Returns the name under which it is exported.
    pub(crate) const fn symbol(&self) -> &'static CStr {
        self.symbol
    }

    /// Returns the address of the function. `None` if the library is not loaded or has no such
    /// function.
    #[inline]
    pub(crate) fn address(&'static self) -> Option<usize> {
        match self.address.load(Ordering::Acquire) {
            0 => self.look_up(),
            known => Some(known),
        }
    }

    /// Looks the function up in the library as it is loaded now: programs close libraries and open
    /// them again.
    pub(crate) fn look_up(&'static self) -> Option<usize> {
        let library = LoadedLibrary::driver(self.library)?;
        let state = LibraryState::of(self.library);
        state.update_base(library.base());
        if !self.is_listed.swap(true, Ordering::AcqRel) {
            state.add(self);
        }
        let address = library.function(self.symbol)?;
        self.address.store(address, Ordering::Release);
        Some(address)
    }
}

/// Declares functions of the driver as unsafe Rust functions of the same names. A function that the
/// library does not have returns the library's error for that.
macro_rules! driver_functions {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        $(
            #[expect(non_snake_case, reason = "the name of the driver's function")]
            unsafe fn $name($($argument: $type),*) -> core::ffi::c_int {
                static FUNCTION: $crate::driver::Function = $crate::driver::Function::new(
                    const { tessera_intercept_symbols::get(stringify!($name)) },
                );
                type Real = unsafe extern "C" fn($($type),*) -> core::ffi::c_int;
                let Some(address) = FUNCTION.address() else {
                    return $crate::driver::absent(FUNCTION.library());
                };
                // SAFETY: the address is that of the function with this name, whose type this is;
                // its arguments are the caller's responsibility.
                unsafe { core::mem::transmute::<usize, Real>(address)($($argument),*) }
            }
        )*
    };
}
pub(super) use driver_functions;
