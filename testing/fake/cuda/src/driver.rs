//! Initialisation, versions and error names.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use tessera_fake_world::Machine;
use tessera_runtime::error_chain::chain;

use crate::abi::{CuResult, OutPtr, export};
use crate::export_tables;
use crate::mps;
use crate::status::{self, Status};

/// The machine after its first use. If its world is invalid, the process has no machine until it is
/// restarted.
static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();

/// PID of the process that called `cuInit`, or 0. As with the real driver, a child process must not
/// use its parent's driver.
static INITIALISED_BY: AtomicU32 = AtomicU32::new(0);

/// Returns the machine of an initialised driver.
pub(crate) fn machine() -> CuResult<&'static Machine> {
    if INITIALISED_BY.load(Ordering::Acquire) != std::process::id() {
        return Err(Status::NotInitialized);
    }
    MACHINE.get().and_then(Option::as_ref).ok_or(Status::NotInitialized)
}

/// Returns the CUDA version of the driver, which is available before `cuInit`.
pub(crate) fn cuda_number() -> CuResult<c_int> {
    Ok(open()?.world().driver.cuda_number())
}

/// Returns the machine and opens it at first use.
fn open() -> CuResult<&'static Machine> {
    let opened = MACHINE.get_or_init(|| {
        Machine::open()
            .inspect_err(|error| eprintln!("fake libcuda.so.1: {}", chain(error.as_ref())))
            .ok()
    });
    opened.as_ref().ok_or(Status::NoDevice)
}

/// Returns the indices of the GPUs that this process may use, in the order of their ordinals.
pub(crate) fn visible() -> CuResult<&'static [usize]> {
    machine().map(visible_of)
}

fn visible_of(machine: &Machine) -> &'static [usize] {
    static VISIBLE: OnceLock<Vec<usize>> = OnceLock::new();
    VISIBLE.get_or_init(|| match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => selected(&list, machine),
        Err(_) => machine.visible().to_vec(),
    })
}

/// Returns the GPUs of a `CUDA_VISIBLE_DEVICES`: ordinals and beginnings of UUIDs. The first one
/// that does not exist ends the list, as in NVIDIA's driver.
fn selected(list: &str, machine: &Machine) -> Vec<usize> {
    let visible = machine.visible();
    let find = |wanted: &str| match wanted.parse::<usize>() {
        Ok(ordinal) => visible.get(ordinal).copied(),
        Err(_) if wanted.starts_with("GPU-") => {
            let has = |gpu: &&usize| machine.world().gpus[**gpu].uuid.starts_with(wanted);
            visible.iter().find(has).copied()
        }
        Err(_) => None,
    };
    list.split(',').map_while(|wanted| find(wanted.trim())).collect()
}

export! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        if visible_of(open()?).is_empty() {
            return Err(Status::NoDevice);
        }
        let me = std::process::id();
        match INITIALISED_BY.compare_exchange(0, me, Ordering::AcqRel, Ordering::Acquire) {
            Err(other) if other != me => Err(Status::NotInitialized),
            _ => {
                mps::connect();
                Ok(())
            }
        }
    }

    fn cuDriverGetVersion(version: OutPtr<c_int>) {
        version.check()?;
        version.set(cuda_number()?)
    }

    fn cuGetErrorName(code: c_uint, name: OutPtr<*const c_char>) {
        let known = status::describe(code);
        name.set(known.map_or(std::ptr::null(), |(name, _)| name.as_ptr()))?;
        known.map(drop).ok_or(Status::InvalidValue)
    }

    fn cuGetErrorString(code: c_uint, text: OutPtr<*const c_char>) {
        let known = status::describe(code);
        text.set(known.map_or(std::ptr::null(), |(_, text)| text.as_ptr()))?;
        known.map(drop).ok_or(Status::InvalidValue)
    }

    fn cuLogsRegisterCallback(callback: *const c_void, data: *const c_void, handle: OutPtr<usize>) {
        let _ = data;
        if callback.is_null() {
            return Err(Status::InvalidValue);
        }
        handle.set_unless_null(1);
        Ok(())
    }

    fn cuLogsUnregisterCallback(handle: usize) {
        let _ = handle;
        machine().map(drop)
    }

    fn cuProfilerStart() { machine().map(drop) }
    fn cuProfilerStop() { machine().map(drop) }

    fn cuGetExportTable(table: OutPtr<*const c_void>, id: *const c_void) {
        table.set(std::ptr::null())?;
        if id.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: by CUDA's contract a UUID, which has 16 bytes.
        let found = export_tables::find(unsafe { id.cast::<[u8; 16]>().read_unaligned() });
        table.set(found.ok_or(Status::NotFound)?)
    }
}
