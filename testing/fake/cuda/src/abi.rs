//! Types of the C interface: results, pointers, strings.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::status::Status;

/// `CUresult`.
pub(crate) type Return = c_uint;

/// Result of a function.
pub(crate) type CuResult<T = ()> = Result<T, Status>;

/// Runs a function's body; a panic must not unwind into C.
pub(crate) fn answer(body: impl FnOnce() -> CuResult) -> Return {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(status)) => status as Return,
        Err(_) => Status::Unknown as Return,
    }
}

/// Exports functions under their C names. A body is a block that returns a [`CuResult`].
macro_rules! export {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("See `", stringify!($name), "` in NVIDIA's CUDA driver API reference.")]
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> $crate::abi::Return {
            let result = $crate::abi::answer(move || {
                $crate::abi::check_not_failing(stringify!($name))?;
                $body
            });
            $crate::abi::trace(stringify!($name), result);
            $crate::abi::preempt(stringify!($name));
            result
        }
    )*};
}
pub(crate) use export;

/// Takes the CPU from the calling thread for a while if `TESSERA_FAKE_CUDA_PREEMPTS` names this
/// function: the work is done, and other threads see that before the caller does.
pub(crate) fn preempt(function: &str) {
    const AWAY: Duration = Duration::from_micros(200);
    static PREEMPTED: OnceLock<Option<String>> = OnceLock::new();
    let preempted =
        PREEMPTED.get_or_init(|| std::env::var("TESSERA_FAKE_CUDA_PREEMPTS").ok()).as_deref();
    if preempted == Some(function) {
        let since = Instant::now();
        while since.elapsed() < AWAY {
            std::thread::yield_now();
        }
    }
}

/// Returns an error if `TESSERA_FAKE_CUDA_FAILS` names this function.
pub(crate) fn check_not_failing(function: &str) -> CuResult {
    static FAILING: OnceLock<Option<String>> = OnceLock::new();
    let failing = FAILING.get_or_init(|| std::env::var("TESSERA_FAKE_CUDA_FAILS").ok());
    if failing.as_deref() == Some(function) { Err(Status::DeviceUnavailable) } else { Ok(()) }
}

/// Body of a naked function that jumps to another function.
macro_rules! jump_to {
    ($symbol:literal) => {{
        #[cfg(target_arch = "x86_64")]
        core::arch::naked_asm!(concat!("jmp ", $symbol, "@PLT"));
        #[cfg(target_arch = "aarch64")]
        core::arch::naked_asm!(concat!("b ", $symbol));
    }};
}
pub(crate) use jump_to;

/// Result of a stub. Like the real library, it requires initialisation first.
pub(crate) fn not_supported(function: &str) -> Return {
    let result = answer(|| {
        crate::driver::machine()?;
        Err(Status::NotSupported)
    });
    trace(function, result);
    result
}

/// Prints a call that failed, if `TESSERA_FAKE_CUDA_TRACE` is set: gaps of this library show there.
/// With the value `all`, prints every call.
pub(crate) fn trace(function: &str, result: Return) {
    static TRACED: OnceLock<Option<String>> = OnceLock::new();
    let traced = TRACED.get_or_init(|| std::env::var("TESSERA_FAKE_CUDA_TRACE").ok()).as_deref();
    if traced == Some("all") || traced.is_some() && result != 0 {
        eprintln!("fake libcuda.so.1: {function} returns {result}");
    }
}

/// Pointer to a result; may be NULL.
#[repr(transparent)]
pub(crate) struct OutPtr<T>(*mut T);

impl<T> Clone for OutPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for OutPtr<T> {}

/// A result whose type depends on another argument.
impl<T> From<*mut c_void> for OutPtr<T> {
    fn from(pointer: *mut c_void) -> Self {
        Self(pointer.cast())
    }
}

/// A result that is used inside this library.
impl OutPtr<crate::state::Handle> {
    pub(crate) fn to(place: &mut crate::state::Handle) -> Self {
        Self(place)
    }
}

impl<T> OutPtr<T> {
    /// Returns an error for NULL. Functions call it before they have side effects.
    pub(crate) fn check(self) -> CuResult {
        if self.0.is_null() { Err(Status::InvalidValue) } else { Ok(()) }
    }

    /// Writes the result.
    pub(crate) fn set(self, value: T) -> CuResult {
        self.check()?;
        // SAFETY: by CUDA's contract a non-NULL result pointer is valid for a value.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Returns the pointer.
    pub(crate) fn pointer(self) -> *mut T {
        self.0
    }

    /// Returns the pointer to a later element.
    pub(crate) fn at(self, position: usize) -> Self {
        Self(self.0.wrapping_add(position))
    }

    /// Writes the result unless the pointer is NULL.
    pub(crate) fn set_unless_null(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: as in `set`.
            unsafe { self.0.write_unaligned(value) };
        }
    }
}

impl OutPtr<c_char> {
    /// Writes a C string and truncates it to the buffer.
    pub(crate) fn set_text(self, length: i32, text: &str) -> CuResult {
        self.check()?;
        let room = usize::try_from(length).ok().and_then(|length| length.checked_sub(1));
        let room = room.ok_or(Status::InvalidValue)?;
        for (position, byte) in text.bytes().take(room).chain([0]).enumerate() {
            // SAFETY: by CUDA's contract the buffer has `length` bytes, and no more are
            // written.
            unsafe { self.0.add(position).write(byte as c_char) };
        }
        Ok(())
    }
}

/// Pointer to an argument; may be NULL.
#[repr(transparent)]
pub(crate) struct InPtr<T>(*const T);

impl<T> Clone for InPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for InPtr<T> {}

/// A parameter that is also a result.
impl<T> From<*mut c_void> for InPtr<T> {
    fn from(pointer: *mut c_void) -> Self {
        Self(pointer.cast_const().cast())
    }
}

impl<T: Copy> InPtr<T> {
    /// Reads the value.
    pub(crate) fn get(self) -> CuResult<T> {
        self.get_at(0)
    }

    /// Reads an element of an array whose length the caller guarantees.
    pub(crate) fn get_at(self, position: usize) -> CuResult<T> {
        if self.0.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: by CUDA's contract parameters point to initialised values, and arrays have the
        // length of the function's count.
        Ok(unsafe { self.0.add(position).read_unaligned() })
    }
}

impl InPtr<c_char> {
    /// Returns the text, or an error for NULL or invalid UTF-8.
    pub(crate) fn text(&self) -> CuResult<&str> {
        if self.0.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: by CUDA's contract a non-NULL string is terminated and outlives the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Status::InvalidValue)
    }
}
