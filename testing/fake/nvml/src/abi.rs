//! Types of the C interface: results, device handles, pointers.

use std::ffi::{CStr, c_char, c_uint};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use nvml_wrapper_sys::bindings::nvmlDevice_t;
use tessera_fake_world::{Control, Gpu, Machine};

/// `nvmlReturn_t`.
pub(crate) type Return = c_uint;

/// The modelled error codes; the names are NVIDIA's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Code {
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NoPermission = 4,
    NotFound = 6,
    InsufficientSize = 7,
    DriverNotLoaded = 9,
    Timeout = 10,
    GpuIsLost = 15,
    InUse = 19,
    InsufficientResources = 23,
    ArgumentVersionMismatch = 25,
    Unknown = 999,
}

/// Result of a function.
pub(crate) type NvmlResult<T = ()> = Result<T, Code>;

/// Runs a function's body; a panic must not unwind into C.
pub(crate) fn answer(body: impl FnOnce() -> NvmlResult) -> Return {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code as Return,
        Err(_) => Code::Unknown as Return,
    }
}

/// Exports functions under their C names. A body is a block that returns a [`NvmlResult`].
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

/// Result of a stub. Like the real library, it requires initialisation first.
pub(crate) fn not_supported() -> Return {
    answer(|| {
        crate::library::machine()?;
        Err(Code::NotSupported)
    })
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

impl<T> OutPtr<T> {
    /// Returns a pointer to a variable of this library.
    pub(crate) fn to(place: &mut T) -> Self {
        Self(place)
    }

    /// Returns a pointer of a structure of the caller.
    pub(crate) fn at_pointer(pointer: *mut T) -> Self {
        Self(pointer)
    }

    /// Returns true for NULL.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Writes a value.
    pub(crate) fn set(self, value: T) -> NvmlResult {
        self.set_all([value])
    }

    /// Writes values to an array that is long enough.
    pub(crate) fn set_all(self, values: impl IntoIterator<Item = T>) -> NvmlResult {
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

impl<T: Copy> OutPtr<T> {
    /// Reads the caller's value: sizes, struct versions, field ids.
    pub(crate) fn get(self) -> NvmlResult<T> {
        self.get_at(0)
    }

    /// Reads an element of an array that is long enough.
    pub(crate) fn get_at(self, position: usize) -> NvmlResult<T> {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        // SAFETY: by NVML's contract in/out parameters point to initialised values, as many as
        // the function's sizes say.
        Ok(unsafe { self.0.add(position).read() })
    }

    /// Returns the pointer to a later element.
    pub(crate) fn at(self, position: usize) -> Self {
        Self(self.0.wrapping_add(position))
    }
}

impl OutPtr<c_char> {
    /// Writes a C string, if it fits.
    pub(crate) fn set_text(self, length: c_uint, text: &str) -> NvmlResult {
        if self.0.is_null() {
            return Err(Code::InvalidArgument);
        }
        if text.len() >= length as usize {
            return Err(Code::InsufficientSize);
        }
        self.set_all(text.bytes().chain([0]).map(|byte| byte as c_char))
    }
}

/// Writes a list by NVML's convention: the count is the capacity on entry and the required size on
/// return. Returns `INSUFFICIENT_SIZE` if the capacity is too small.
pub(crate) fn set_list<T>(count: OutPtr<c_uint>, list: OutPtr<T>, values: Vec<T>) -> NvmlResult {
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

/// A C string of the caller; may be NULL.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct InText(*const c_char);

impl InText {
    /// Returns the text, or an error for NULL or invalid UTF-8.
    pub(crate) fn get(&self) -> NvmlResult<&str> {
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

/// First handle value; far from small numbers, so that indexes and garbage pointers are not valid
/// handles.
const FIRST_HANDLE: usize = 0x7e55_e7a0_0000;
/// First handle of an object of MIG.
const FIRST_MIG_HANDLE: usize = 0x7e55_e7b0_0000;

impl Handle {
    /// Returns the handle of the GPU with that index.
    pub(crate) fn of(index: usize) -> Self {
        Self(FIRST_HANDLE + index)
    }

    /// Returns the handle of the MIG object with that number.
    pub(crate) fn of_mig(number: usize) -> Self {
        Self(FIRST_MIG_HANDLE + number)
    }

    /// Returns the number of the MIG object, or `None` for a GPU.
    pub(crate) fn mig_number(self) -> Option<usize> {
        self.0.checked_sub(FIRST_MIG_HANDLE)
    }

    /// Returns the handle in the form of NVIDIA's structs.
    pub(crate) fn as_raw(self) -> nvmlDevice_t {
        self.0 as nvmlDevice_t
    }

    /// Returns the GPU in any condition.
    pub(crate) fn any_device(self) -> NvmlResult<Device> {
        let machine = crate::library::machine()?;
        let index = self.0.checked_sub(FIRST_HANDLE).ok_or(Code::InvalidArgument)?;
        if index >= machine.world().gpus.len() {
            return Err(Code::InvalidArgument);
        }
        let control = machine.control();
        Ok(Device { machine, control, index })
    }

    /// Returns the GPU, or an error if it is lost or hangs.
    pub(crate) fn device(self) -> NvmlResult<Device> {
        let device = self.any_device()?;
        if device.control.is_lost(&device.uuid) {
            return Err(Code::GpuIsLost);
        }
        if device.control.is_hung(&device.uuid) { Err(Code::Unknown) } else { Ok(device) }
    }
}

/// A GPU during one call.
pub(crate) struct Device {
    /// Machine of the GPU.
    pub(crate) machine: Arc<Machine>,
    /// Condition of the machine.
    pub(crate) control: Arc<Control>,
    index: usize,
}

impl Device {
    /// Returns the index of the GPU in the world.
    pub(crate) fn gpu_index(&self) -> usize {
        self.index
    }
}

impl Deref for Device {
    type Target = Gpu;

    fn deref(&self) -> &Gpu {
        &self.machine.world().gpus[self.index]
    }
}
