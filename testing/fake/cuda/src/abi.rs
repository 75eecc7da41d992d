//! What crosses the C boundary: results, pointers, strings.

use std::ffi::{CStr, c_char, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use crate::status::Status;

/// `CUresult`.
pub(crate) type Return = c_uint;

/// What a function answers.
pub(crate) type Answer<T = ()> = Result<T, Status>;

/// Runs a function's body; a panic must not unwind into C.
pub(crate) fn answer(body: impl FnOnce() -> Answer) -> Return {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(status)) => status as Return,
        Err(_) => Status::Unknown as Return,
    }
}

/// Exports functions under their C names. A body is a block that gives an [`Answer`].
macro_rules! export {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("See `", stringify!($name), "` in NVIDIA's CUDA driver API reference.")]
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> $crate::abi::Return {
            $crate::abi::answer(move || {
                $crate::abi::works(stringify!($name))?;
                $body
            })
        }
    )*};
}
pub(crate) use export;

/// Whether a function works. The one that `TESSERA_FAKE_CUDA_FAILS` names does nothing but fail.
pub(crate) fn works(function: &str) -> Answer {
    static FAILING: OnceLock<Option<String>> = OnceLock::new();
    let failing = FAILING.get_or_init(|| std::env::var("TESSERA_FAKE_CUDA_FAILS").ok());
    if failing.as_deref() == Some(function) { Err(Status::DeviceUnavailable) } else { Ok(()) }
}

/// The body of a naked function that is another function.
macro_rules! jump_to {
    ($symbol:literal) => {{
        #[cfg(target_arch = "x86_64")]
        core::arch::naked_asm!(concat!("jmp ", $symbol, "@PLT"));
        #[cfg(target_arch = "aarch64")]
        core::arch::naked_asm!(concat!("b ", $symbol));
    }};
}
pub(crate) use jump_to;

/// What a stub answers: like the real library, it first wants to be initialised.
pub(crate) fn not_supported() -> Return {
    answer(|| {
        crate::driver::machine()?;
        Err(Status::NotSupported)
    })
}

/// A pointer through which a result is handed out; may be NULL.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

/// A result whose type depends on what is asked for.
impl<T> From<*mut c_void> for Out<T> {
    fn from(pointer: *mut c_void) -> Self {
        Self(pointer.cast())
    }
}

/// A result that is wanted in here.
impl Out<crate::state::Handle> {
    pub(crate) fn to(place: &mut crate::state::Handle) -> Self {
        Self(place)
    }
}

impl<T> Out<T> {
    /// Fails for NULL: for functions that must not do anything before they know where to put the
    /// result.
    pub(crate) fn check(self) -> Answer {
        if self.0.is_null() { Err(Status::InvalidValue) } else { Ok(()) }
    }

    /// Hands out a value.
    pub(crate) fn set(self, value: T) -> Answer {
        self.check()?;
        // SAFETY: by CUDA's contract a non-NULL result pointer is valid for a value.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// The pointer itself.
    pub(crate) fn pointer(self) -> *mut T {
        self.0
    }

    /// The pointer to a later element.
    pub(crate) fn at(self, position: usize) -> Self {
        Self(self.0.wrapping_add(position))
    }

    /// Hands out a value where it is wanted.
    pub(crate) fn set_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: as in `set`.
            unsafe { self.0.write_unaligned(value) };
        }
    }
}

impl Out<c_char> {
    /// Hands out a C string, cut off where it does not fit.
    pub(crate) fn set_text(self, length: i32, text: &str) -> Answer {
        self.check()?;
        let room = usize::try_from(length).ok().and_then(|length| length.checked_sub(1));
        let room = room.ok_or(Status::InvalidValue)?;
        for (position, byte) in text.bytes().take(room).chain([0]).enumerate() {
            // SAFETY: by CUDA's contract the buffer has `length` bytes, and no more than that are
            // written.
            unsafe { self.0.add(position).write(byte as c_char) };
        }
        Ok(())
    }
}

/// A pointer to what the caller hands in; may be NULL.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

/// A parameter that is a result too.
impl<T> From<*mut c_void> for In<T> {
    fn from(pointer: *mut c_void) -> Self {
        Self(pointer.cast_const().cast())
    }
}

impl<T: Copy> In<T> {
    /// Reads the value.
    pub(crate) fn get(self) -> Answer<T> {
        self.get_at(0)
    }

    /// Reads an element of an array that the caller says is long enough.
    pub(crate) fn get_at(self, position: usize) -> Answer<T> {
        if self.0.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: by CUDA's contract parameters point to initialised values, as many as the
        // function's counts say.
        Ok(unsafe { self.0.add(position).read_unaligned() })
    }
}

impl In<c_char> {
    /// The text, if there is one and it is UTF-8.
    pub(crate) fn text(&self) -> Answer<&str> {
        if self.0.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: by CUDA's contract a non-NULL string is terminated and outlives the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Status::InvalidValue)
    }
}
