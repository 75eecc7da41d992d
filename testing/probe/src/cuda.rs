//! The used functions of the CUDA driver API.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

use crate::library::Library;
use crate::memory::Memory;
use crate::report::Failure;

type Result<T> = std::result::Result<T, Failure>;

/// The CUDA driver.
#[derive(Debug)]
pub(crate) struct Cuda {
    error_name: extern "C" fn(c_int, *mut *const c_char) -> c_int,
    driver_version: extern "C" fn(*mut c_int) -> c_int,
    device_count: extern "C" fn(*mut c_int) -> c_int,
    device_get: extern "C" fn(*mut c_int, c_int) -> c_int,
    device_name: extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
    device_uuid: extern "C" fn(*mut [u8; 16], c_int) -> c_int,
    device_total: extern "C" fn(*mut usize, c_int) -> c_int,
    device_attribute: extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    retain: extern "C" fn(*mut *mut c_void, c_int) -> c_int,
    release: extern "C" fn(c_int) -> c_int,
    set_current: extern "C" fn(*mut c_void) -> c_int,
    memory_info: extern "C" fn(*mut usize, *mut usize) -> c_int,
    allocate: extern "C" fn(*mut u64, usize) -> c_int,
}

impl Cuda {
    /// Opens and initialises the driver.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let library = Library::open(path)?;
        // SAFETY: `cuInit` takes flags.
        let init: extern "C" fn(c_uint) -> c_int = unsafe { library.function(c"cuInit")? };
        // SAFETY: the types are those of cuda.h.
        let cuda = unsafe {
            Self {
                error_name: library.function(c"cuGetErrorName")?,
                driver_version: library.function(c"cuDriverGetVersion")?,
                device_count: library.function(c"cuDeviceGetCount")?,
                device_get: library.function(c"cuDeviceGet")?,
                device_name: library.function(c"cuDeviceGetName")?,
                device_uuid: library.function(c"cuDeviceGetUuid")?,
                device_total: library.function(c"cuDeviceTotalMem_v2")?,
                device_attribute: library.function(c"cuDeviceGetAttribute")?,
                retain: library.function(c"cuDevicePrimaryCtxRetain")?,
                release: library.function(c"cuDevicePrimaryCtxRelease_v2")?,
                set_current: library.function(c"cuCtxSetCurrent")?,
                memory_info: library.function(c"cuMemGetInfo_v2")?,
                allocate: library.function(c"cuMemAlloc_v2")?,
            }
        };
        cuda.check("cuInit", init(0))?;
        Ok(cuda)
    }

    /// Returns the CUDA version of the driver: 13000 is 13.0.
    pub(crate) fn version(&self) -> Result<i32> {
        let mut version = 0;
        self.check("cuDriverGetVersion", (self.driver_version)(&mut version))?;
        Ok(version)
    }

    /// Returns the number of GPUs.
    pub(crate) fn count(&self) -> Result<i32> {
        let mut count = 0;
        self.check("cuDeviceGetCount", (self.device_count)(&mut count))?;
        Ok(count)
    }

    /// Returns a GPU.
    pub(crate) fn device(&self, index: i32) -> Result<Device<'_>> {
        let mut device = 0;
        self.check("cuDeviceGet", (self.device_get)(&mut device, index))?;
        Ok(Device { cuda: self, device })
    }

    fn check(&self, call: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        Err(Failure { call: call.to_owned(), code, name: self.name_of(code) })
    }

    fn name_of(&self, code: c_int) -> String {
        let mut name = std::ptr::null();
        if (self.error_name)(code, &mut name) != 0 || name.is_null() {
            return format!("CUDA_ERROR_{code}");
        }
        // SAFETY: on success the driver returns a terminated string that is never freed.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

/// A GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Device<'a> {
    cuda: &'a Cuda,
    device: c_int,
}

impl<'a> Device<'a> {
    /// Returns the UUID with the prefix `GPU-`.
    pub(crate) fn uuid(&self) -> Result<String> {
        let mut bytes = [0; 16];
        self.cuda.check("cuDeviceGetUuid", (self.cuda.device_uuid)(&mut bytes, self.device))?;
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(format!(
            "GPU-{}-{}-{}-{}-{}",
            &hex[..8],
            &hex[8..12],
            &hex[12..16],
            &hex[16..20],
            &hex[20..]
        ))
    }

    /// Returns the product name.
    pub(crate) fn name(&self) -> Result<String> {
        let mut name = [0; 256];
        let code = (self.cuda.device_name)(name.as_mut_ptr().cast(), 256, self.device);
        self.cuda.check("cuDeviceGetName", code)?;
        let text = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    /// Returns the memory in bytes.
    pub(crate) fn total(&self) -> Result<u64> {
        let mut bytes = 0;
        self.cuda
            .check("cuDeviceTotalMem_v2", (self.cuda.device_total)(&mut bytes, self.device))?;
        Ok(bytes as u64)
    }

    /// Returns the number of multiprocessors available to this process.
    pub(crate) fn multiprocessors(&self) -> Result<i32> {
        /// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`
        const MULTIPROCESSOR_COUNT: c_int = 16;
        let mut count = 0;
        let code = (self.cuda.device_attribute)(&mut count, MULTIPROCESSOR_COUNT, self.device);
        self.cuda.check("cuDeviceGetAttribute", code)?;
        Ok(count)
    }

    /// Returns the primary context, which is current in this thread until the value is dropped.
    pub(crate) fn context(self) -> Result<Context<'a>> {
        let mut context = std::ptr::null_mut();
        self.cuda
            .check("cuDevicePrimaryCtxRetain", (self.cuda.retain)(&mut context, self.device))?;
        let current = Context { device: self };
        self.cuda.check("cuCtxSetCurrent", (self.cuda.set_current)(context))?;
        Ok(current)
    }
}

/// A current context. Dropping it releases its memory.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    device: Device<'a>,
}

impl Context<'_> {
    /// Returns the memory that CUDA reports.
    pub(crate) fn memory(&self) -> Result<Memory> {
        let (mut free, mut total) = (0, 0);
        let cuda = self.device.cuda;
        cuda.check("cuMemGetInfo_v2", (cuda.memory_info)(&mut free, &mut total))?;
        let (free, total) = (free as u64, total as u64);
        Ok(Memory { total, used: total.saturating_sub(free), free })
    }

    /// Allocates memory.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<()> {
        let mut pointer = 0;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.device.cuda.check("cuMemAlloc_v2", (self.device.cuda.allocate)(&mut pointer, size))
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        (self.device.cuda.set_current)(std::ptr::null_mut());
        (self.device.cuda.release)(self.device.device);
    }
}
