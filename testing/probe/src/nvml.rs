//! The used functions of NVML.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use crate::library::Library;
use crate::memory::Memory;
use crate::report::Failure;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// NVML.
#[derive(Debug)]
pub(crate) struct Nvml {
    error_string: extern "C" fn(c_int) -> *const c_char,
    by_uuid: extern "C" fn(*const c_char, *mut *mut c_void) -> c_int,
    memory_info: extern "C" fn(*mut c_void, *mut MemoryInfo) -> c_int,
}

impl Nvml {
    /// Opens and initialises NVML.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let library = Library::open(path)?;
        // SAFETY: `nvmlInit_v2` has no arguments.
        let init: extern "C" fn() -> c_int = unsafe { library.function(c"nvmlInit_v2")? };
        // SAFETY: the types are those of nvml.h.
        let nvml = unsafe {
            Self {
                error_string: library.function(c"nvmlErrorString")?,
                by_uuid: library.function(c"nvmlDeviceGetHandleByUUID")?,
                memory_info: library.function(c"nvmlDeviceGetMemoryInfo")?,
            }
        };
        nvml.check("nvmlInit_v2", init())?;
        Ok(nvml)
    }

    /// Returns the memory that NVML reports for a GPU.
    pub(crate) fn memory(&self, uuid: &str) -> Result<Memory, Failure> {
        let uuid = CString::new(uuid).unwrap_or_default();
        let mut device = std::ptr::null_mut();
        self.check("nvmlDeviceGetHandleByUUID", (self.by_uuid)(uuid.as_ptr(), &mut device))?;
        let mut info = MemoryInfo::default();
        self.check("nvmlDeviceGetMemoryInfo", (self.memory_info)(device, &mut info))?;
        Ok(Memory { total: info.total, used: info.used, free: info.free })
    }

    fn check(&self, call: &str, code: c_int) -> Result<(), Failure> {
        if code == 0 {
            return Ok(());
        }
        let text = (self.error_string)(code);
        let name = if text.is_null() {
            format!("NVML_ERROR_{code}")
        } else {
            // SAFETY: NVML returns terminated strings that are never freed.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(Failure { call: call.to_owned(), code, name })
    }
}
