//! What crosses the C boundary: results, device handles, pointers.

use std::ffi::{CStr, c_char, c_uint};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use nvml_wrapper_sys::bindings::nvmlDevice_t;
use tessera_fake_world::{Control, Gpu, Machine};

/// `nvmlReturn_t`.
pub(crate) type Return = c_uint;

/// The error codes that are used here; the names are NVIDIA's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Code {
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NotFound = 6,
    InsufficientSize = 7,
    DriverNotLoaded = 9,
    Timeout = 10,
    GpuIsLost = 15,
    ArgumentVersionMismatch = 25,
    Unknown = 999,
}

/// What a function answers.
pub(crate) type Answer<T = ()> = Result<T, Code>;

/// Runs a function's body; a panic must not unwind into C.
pub(crate) fn answer(body: impl FnOnce() -> Answer) -> Return {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code as Return,
        Err(_) => Code::Unknown as Return,
    }
}

/// Exports functions under their C names. A body is a block that gives an [`Answer`].
macro_rules! export {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("See `", stringify!($name), "` in NVIDIA's NVML reference.")]
        $(#[$attribute])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> $crate::abi::Return {
            $crate::abi::answer(move || $body)
        }
    )*};
}
pub(crate) use export;

/// What a stub answers: like the real library, it first wants to be initialised.
pub(crate) fn not_supported() -> Return {
    answer(|| {
        crate::library::machine()?;
        Err(Code::NotSupported)
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

impl<T> Out<T> {
    /// A result that is wanted in here.
    pub(crate) fn to(place: &mut T) -> Self {
        Self(place)
    }

    /// A pointer in a structure of the caller's.
    pub(crate) fn at_pointer(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// Whether it is NULL.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Hands out a value.
    pub(crate) fn set(self, value: T) -> Answer {
        self.set_all([value])
    }

    /// Hands out values, one after the other; the caller has made sure that the array is long
    /// enough.
    pub(crate) fn set_all(self, values: impl IntoIterator<Item = T>) -> Answer {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        for (position, value) in values.into_iter().enumerate() {
            // SAFETY: by NVML's contract a non-NULL result pointer is valid for as many values as
            // the function's sizes say.
            unsafe { self.0.add(position).write(value) };
        }
        Ok(())
    }
}

impl<T: Copy> Out<T> {
    /// Reads what the caller put there: sizes, struct versions, field ids.
    pub(crate) fn get(self) -> Answer<T> {
        self.get_at(0)
    }

    /// Reads an element of an array that the caller says is long enough.
    pub(crate) fn get_at(self, position: usize) -> Answer<T> {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        // SAFETY: by NVML's contract in/out parameters point to initialised values, as many as the
        // function's sizes say.
        Ok(unsafe { self.0.add(position).read() })
    }

    /// The pointer to a later element.
    pub(crate) fn at(self, position: usize) -> Self {
        Self(self.0.wrapping_add(position))
    }
}

impl Out<c_char> {
    /// Hands out a C string, if it fits.
    pub(crate) fn set_text(self, length: c_uint, text: &str) -> Answer {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        if text.len() >= length as usize {
            return Err(Code::InsufficientSize);
        }
        self.set_all(text.bytes().chain([0]).map(|byte| byte as c_char))
    }
}

/// Hands out a list by NVML's rule: the count says how much room there is, and is answered with how
/// much is needed; too little room is `INSUFFICIENT_SIZE`.
pub(crate) fn set_list<T>(count: Out<c_uint>, list: Out<T>, values: Vec<T>) -> Answer {
    let room = count.get()? as usize;
    count.set(values.len() as c_uint)?;
    if values.is_empty() {
        return Ok(());
    }
    if room < values.len() {
        return Err(Code::InsufficientSize);
    }
    list.set_all(values)
}

/// A C string that the caller hands in; may be NULL.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// The text, if there is one and it is UTF-8.
    pub(crate) fn get(&self) -> Answer<&str> {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        // SAFETY: by NVML's contract a non-NULL string is terminated and outlives the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Code::InvalidArgument)
    }
}

/// `nvmlDevice_t`: opaque to the caller, never dereferenced.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle(usize);

/// Far from 0 and from small numbers, so that an index or a garbage pointer is not taken for a
/// handle.
const FIRST_HANDLE: usize = 0x7e55_e7a0_0000;

impl Handle {
    /// The handle of the GPU with that index.
    pub(crate) fn of(index: usize) -> Self {
        Self(FIRST_HANDLE + index)
    }

    /// As NVIDIA's structs hold it.
    pub(crate) fn as_raw(self) -> nvmlDevice_t {
        self.0 as nvmlDevice_t
    }

    /// The GPU, alive or not.
    pub(crate) fn any_device(self) -> Answer<Device> {
        let machine = crate::library::machine()?;
        let index = self.0.checked_sub(FIRST_HANDLE).ok_or(Code::InvalidArgument)?;
        if index >= machine.world().gpus.len() {
            return Err(Code::InvalidArgument);
        }
        let control = machine.control();
        Ok(Device { machine, control, index })
    }

    /// The GPU; one that fell off the bus answers every call so, and one that hangs none.
    pub(crate) fn device(self) -> Answer<Device> {
        let device = self.any_device()?;
        if device.control.is_lost(&device.uuid) {
            return Err(Code::GpuIsLost);
        }
        if device.control.is_hung(&device.uuid) { Err(Code::Unknown) } else { Ok(device) }
    }
}

/// A GPU, as one call sees it.
pub(crate) struct Device {
    /// The machine it is in.
    pub(crate) machine: Arc<Machine>,
    /// What is happening.
    pub(crate) control: Arc<Control>,
    index: usize,
}

impl Deref for Device {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.machine.world().gpus[self.index]
    }
}
