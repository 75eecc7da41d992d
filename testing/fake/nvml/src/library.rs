//! Initialisation, errors and versions.

use std::ffi::{c_char, c_int, c_uint};
use std::sync::{Arc, Mutex, PoisonError};

use tessera_fake_world::Machine;
use tessera_runtime::error_chain::chain;

use crate::abi::{Code, NvmlResult, OutPtr, Return, export};

/// Number of initialisations, and the machine.
struct Library {
    users: u32,
    machine: Option<Arc<Machine>>,
}

static LIBRARY: Mutex<Library> = Mutex::new(Library { users: 0, machine: None });

/// Returns the machine if the library is initialised.
pub(crate) fn machine() -> NvmlResult<Arc<Machine>> {
    let library = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    library.machine.clone().ok_or(Code::Uninitialized)
}

fn init() -> NvmlResult {
    let mut library = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    if library.machine.is_none() {
        let machine = Machine::open().map_err(|error| {
            print_error(error.as_ref());
            Code::DriverNotLoaded
        })?;
        if machine.control().driver_not_loaded {
            return Err(Code::DriverNotLoaded);
        }
        library.machine = Some(Arc::new(machine));
    }
    library.users += 1;
    Ok(())
}

/// Prints an error, because NVML has no code for an invalid world file.
fn print_error(error: &dyn std::error::Error) {
    eprintln!("libnvidia-ml.so.1 (fake): {}", chain(error));
}

fn shutdown() -> NvmlResult {
    let mut library = LIBRARY.lock().unwrap_or_else(PoisonError::into_inner);
    library.users = library.users.checked_sub(1).ok_or(Code::Uninitialized)?;
    if library.users == 0 {
        library.machine = None;
        crate::events::clear();
    }
    Ok(())
}

export! {
    fn nvmlInit() { init() }
    fn nvmlInit_v2() { init() }
    fn nvmlInitWithFlags(_flags: c_uint) { init() }
    fn nvmlShutdown() { shutdown() }

    fn nvmlSystemGetDriverVersion(version: OutPtr<c_char>, length: c_uint) {
        version.set_text(length, &machine()?.world().driver.version)
    }
    fn nvmlSystemGetNVMLVersion(version: OutPtr<c_char>, length: c_uint) {
        version.set_text(length, &machine()?.world().driver.nvml_version())
    }
    fn nvmlSystemGetCudaDriverVersion(version: OutPtr<c_int>) {
        version.set(machine()?.world().driver.cuda_number())
    }
    fn nvmlSystemGetCudaDriverVersion_v2(version: OutPtr<c_int>) {
        version.set(machine()?.world().driver.cuda_number())
    }
    fn nvmlSystemGetProcessName(pid: c_uint, name: OutPtr<c_char>, length: c_uint) {
        let machine = machine()?;
        let processes = machine.world().gpus.iter().flat_map(|gpu| machine.processes(gpu));
        let found = processes.into_iter().find(|process| process.pid == pid).ok_or(Code::NotFound)?;
        name.set_text(length, &found.name)
    }
}

/// Returns the text of an error code; valid before initialisation.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: Return) -> *const c_char {
    let text = match result {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        15 => c"GPU is lost",
        19 => c"In use by another client",
        23 => c"Insufficient Resources",
        25 => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}
