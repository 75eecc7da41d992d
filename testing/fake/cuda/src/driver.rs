//! Initialisation, versions, the names of errors.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use tessera_fake_world::Machine;
use tessera_runtime::error_chain::chain;

use crate::abi::{Answer, Out, export};
use crate::mps;
use crate::status::{self, Status};

/// The machine, once it was asked for. A world that cannot be used stays so: the process must start
/// anew.
static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();

/// The process that called `cuInit`; 0 = none has. Like with the real driver, a child must not use
/// what its parent began.
static INITIALISED_BY: AtomicU32 = AtomicU32::new(0);

/// The machine of an initialised driver.
pub(crate) fn machine() -> Answer<&'static Machine> {
    if INITIALISED_BY.load(Ordering::Acquire) != std::process::id() {
        return Err(Status::NotInitialized);
    }
    MACHINE.get().and_then(Option::as_ref).ok_or(Status::NotInitialized)
}

/// The CUDA version that the driver serves; known before `cuInit`.
pub(crate) fn cuda_number() -> Answer<c_int> {
    Ok(open()?.world().driver.cuda_number())
}

/// The machine, opened if need be.
fn open() -> Answer<&'static Machine> {
    let opened = MACHINE.get_or_init(|| {
        Machine::open().inspect_err(|error| eprintln!("fake libcuda.so.1: {}", chain(error))).ok()
    });
    opened.as_ref().ok_or(Status::NoDevice)
}

export! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        let machine = open()?;
        if machine.visible().is_empty() {
            return Err(Status::NoDevice);
        }
        let me = std::process::id();
        match INITIALISED_BY.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
            Err(other) if other != me => Err(Status::NotInitialized),
            _ => {
                mps::join();
                Ok(())
            }
        }
    }

    fn cuDriverGetVersion(version: Out<c_int>) {
        version.check()?;
        version.set(cuda_number()?)
    }

    fn cuGetErrorName(code: c_uint, name: Out<*const c_char>) {
        let known = status::describe(code);
        name.set(known.map_or(std::ptr::null(), |(name, _)| name.as_ptr()))?;
        known.map(drop).ok_or(Status::InvalidValue)
    }

    fn cuGetErrorString(code: c_uint, text: Out<*const c_char>) {
        let known = status::describe(code);
        text.set(known.map_or(std::ptr::null(), |(_, text)| text.as_ptr()))?;
        known.map(drop).ok_or(Status::InvalidValue)
    }

    fn cuGetExportTable(table: Out<*const c_void>, id: *const c_void) {
        // The tables are NVIDIA's own and documented nowhere.
        let _ = id;
        table.set(std::ptr::null())?;
        Err(Status::NotFound)
    }
}
