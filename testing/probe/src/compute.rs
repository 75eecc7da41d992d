//! Kernel launches, to measure the share of GPU time that a process gets.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::library::Library;
use crate::report::{Computed, Failure};

/// Kernel whose name tells the fake CUDA driver its duration, [`KERNEL`].
const KERNEL_NAME: &CStr = c"spin_for_1ms";
const KERNEL: Duration = Duration::from_millis(1);

/// Time of launches before the measurement, in which the budget saved while idle is used up.
const WARM_UP: Duration = Duration::from_millis(200);

type LaunchKernel = extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut c_void,
    *const *const c_void,
    *const *const c_void,
) -> c_int;

/// Functions of the CUDA driver API that launch kernels.
struct Launcher {
    launch: LaunchKernel,
    synchronize: extern "C" fn() -> c_int,
    function: *mut c_void,
}

impl Launcher {
    /// Loads the kernel into the current context.
    fn load(library: &Path) -> Result<Self, Failure> {
        let library = Library::open(library)?;
        type Load = extern "C" fn(*mut *mut c_void, *const c_void) -> c_int;
        type GetFunction = extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> c_int;
        // SAFETY: the types are those of cuda.h.
        let (load, get_function): (Load, GetFunction) = unsafe {
            (library.function(c"cuModuleLoadData")?, library.function(c"cuModuleGetFunction")?)
        };
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        check("cuModuleLoadData", load(&mut module, c"image".as_ptr().cast()))?;
        check("cuModuleGetFunction", get_function(&mut function, module, KERNEL_NAME.as_ptr()))?;
        // SAFETY: the types are those of cuda.h.
        unsafe {
            Ok(Self {
                launch: library.function(c"cuLaunchKernel")?,
                synchronize: library.function(c"cuCtxSynchronize")?,
                function,
            })
        }
    }

    /// Launches kernels for `time` and returns their number and the time until all have ended.
    fn launch_for(&self, time: Duration) -> Result<(u32, Duration), Failure> {
        let begin = Instant::now();
        let mut launches = 0;
        let (nowhere, none) = (std::ptr::null_mut(), std::ptr::null());
        while begin.elapsed() < time {
            let code = (self.launch)(self.function, 1, 1, 1, 32, 1, 1, 0, nowhere, none, none);
            check("cuLaunchKernel", code)?;
            launches += 1;
            // A queue that is neither empty nor long keeps the GPU busy.
            if launches % 16 == 0 {
                check("cuCtxSynchronize", (self.synchronize)())?;
            }
        }
        check("cuCtxSynchronize", (self.synchronize)())?;
        Ok((launches, begin.elapsed()))
    }
}

fn check(call: &str, code: c_int) -> Result<(), Failure> {
    if code == 0 {
        return Ok(());
    }
    Err(Failure { call: call.to_owned(), code, name: format!("CUDA_ERROR_{code}") })
}

/// Launches kernels in the current context for `time`, and returns their share of it.
pub(crate) fn measure(library: &Path, time: Duration) -> Result<Computed, Failure> {
    let launcher = Launcher::load(library)?;
    launcher.launch_for(WARM_UP)?;
    let (launches, elapsed) = launcher.launch_for(time)?;
    let gpu_seconds = (KERNEL * launches).as_secs_f64();
    let seconds = elapsed.as_secs_f64();
    Ok(Computed { launches, seconds, gpu_seconds, gpu_percent: 100.0 * gpu_seconds / seconds })
}
