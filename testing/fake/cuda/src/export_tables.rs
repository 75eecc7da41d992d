//! Tables of functions without names, which `cuGetExportTable` returns by UUID.
//!
//! NVIDIA's own libraries above the driver (runtime, cuBLAS, cuDNN, cuFFT) call them. They are not
//! documented. What is here was learnt from their calls and from public descriptions of them: the
//! number of entries, which are called, and which answers let the libraries continue. An entry that
//! no library has been seen to call returns `CUDA_ERROR_NOT_SUPPORTED`.

use std::ffi::{c_uint, c_void};

use crate::abi::{CuResult, OutPtr, Return, answer, not_supported};
use crate::context::{self, current};
use crate::context_storage::{self, Destructor};
use crate::device::Device;
use crate::integrity;
use crate::module;
use crate::state::{self, Handle};
use crate::status::Status;

type Entry = *const c_void;

/// A table of `N` entries.
#[repr(transparent)]
pub(crate) struct Table<const N: usize>([Entry; N]);

// SAFETY: the pointers are those of functions, and are never written.
unsafe impl<const N: usize> Sync for Table<N> {}

impl<const N: usize> Table<N> {
    /// Returns a table whose first entry is its size in bytes.
    const fn sized(entries: &[(usize, Entry)]) -> Self {
        let mut table = Self::plain(entries);
        table.0[0] = core::ptr::without_provenance(N * size_of::<Entry>());
        table
    }

    /// Returns a table with these entries; the others are stubs.
    const fn plain(entries: &[(usize, Entry)]) -> Self {
        let mut table = [core::ptr::null(); N];
        let mut index = 0;
        while index < N {
            table[index] = STUBS[index] as Entry;
            index += 1;
        }
        let mut next = 0;
        while next < entries.len() {
            table[entries[next].0] = entries[next].1;
            next += 1;
        }
        Self(table)
    }

    fn address(&'static self) -> *const c_void {
        self.0.as_ptr().cast()
    }
}

/// Modules and the primary context, for the runtime.
static RUNTIME: Table<13> = Table::sized(&[
    (1, load_wrapped as extern "C" fn(_, _) -> _ as Entry),
    (2, primary_context as extern "C" fn(_, _) -> _ as Entry),
    (6, load_wrapped_with_options as extern "C" fn(_, _, _, _, _) -> _ as Entry),
    (7, accept_size as extern "C" fn(_) -> _ as Entry),
    (8, load_with_options as extern "C" fn(_, _, _, _, _) -> _ as Entry),
    (12, succeed as extern "C" fn() -> _ as Entry),
]);

/// Callbacks of debuggers and profilers.
static TOOL_CALLBACKS: Table<7> = Table::sized(&[
    (2, callback_sites as extern "C" fn(_, _) as Entry),
    (6, callback_flags as extern "C" fn(_, _) as Entry),
]);

static TOOL_STORAGE: Table<4> =
    Table::sized(&[(2, current_context as extern "C" fn(_) -> _ as Entry)]);

static CONTEXT_STORAGE: Table<4> = Table::plain(&[
    (0, put as extern "C" fn(_, _, _, _) -> _ as Entry),
    (1, delete as extern "C" fn(_, _) -> _ as Entry),
    (2, get as extern "C" fn(_, _, _) -> _ as Entry),
]);

static CHECKS: Table<4> = Table::sized(&[
    (2, check_context as extern "C" fn(_, _, _) -> _ as Entry),
    (3, succeed as extern "C" fn() -> _ as Entry),
]);

/// Proves to the runtime that the driver is NVIDIA's.
static INTEGRITY: Table<3> =
    Table::sized(&[(1, check_integrity as extern "C" fn(_, _, _) -> _ as Entry)]);

/// For cuBLAS, cuDNN and cuFFT.
static MATHEMATICS: Table<95> = Table::sized(&[
    (4, context_number as extern "C" fn(_, _) -> _ as Entry),
    (39, stream_number as extern "C" fn(_, _, _) -> _ as Entry),
    (51, stream_object as extern "C" fn(_, _, _) -> _ as Entry),
]);

/// For cuBLASLt, which takes an error for "no".
static MATRIX_HINTS: Table<16> = Table::sized(&[]);

/// For cuFFT.
static MODULE_FUNCTIONS: Table<16> =
    Table::sized(&[(7, each_function as extern "C" fn(_, _, _, _) -> _ as Entry)]);

/// Returns the table with this UUID, or `None` if there is none. A UUID is written as its bytes in
/// memory.
pub(crate) fn find(id: [u8; 16]) -> Option<*const c_void> {
    match u128::from_be_bytes(id) {
        0x6bd5_fb6c_5bf4_e74a_8987_d939_12fd_9df9 => Some(RUNTIME.address()),
        0xa094_798c_2e74_2e74_93f2_0800_200c_0a66 => Some(TOOL_CALLBACKS.address()),
        0x42d8_5a81_23f6_cb47_8298_f6e7_8a3a_ecdc => Some(TOOL_STORAGE.address()),
        0xc693_336e_1121_df11_a8c3_68f3_55d8_9593 => Some(CONTEXT_STORAGE.address()),
        0x263e_8860_7cd2_6143_92f6_bbd5_006d_fa7e => Some(CHECKS.address()),
        0xd408_2055_bde6_704b_8d34_ba12_3c66_e1f2 => Some(INTEGRITY.address()),
        0x2131_8c60_9714_3248_8ca6_41ff_7324_c8f2 => Some(MATHEMATICS.address()),
        0x1734_dc26_800d_4745_8726_c0f1_e7dd_8bca => Some(MATRIX_HINTS.address()),
        0x6e16_3fbe_b958_444d_835c_e182_aff1_991e => Some(MODULE_FUNCTIONS.address()),
        _ => None,
    }
}

/// Addresses that the answer to the integrity check depends on.
pub(crate) fn addresses() -> integrity::Addresses {
    integrity::Addresses {
        runtime: RUNTIME.address(),
        integrity: INTEGRITY.address(),
        function: check_integrity as extern "C" fn(_, _, _) -> _ as *const c_void,
    }
}

/// Stubs by index, so that a trace names the entry that a library calls.
#[rustfmt::skip]
const STUBS: [extern "C" fn() -> Return; 96] = [
    stub::<0>, stub::<1>, stub::<2>, stub::<3>, stub::<4>, stub::<5>, stub::<6>,
    stub::<7>, stub::<8>, stub::<9>, stub::<10>, stub::<11>, stub::<12>, stub::<13>,
    stub::<14>, stub::<15>, stub::<16>, stub::<17>, stub::<18>, stub::<19>, stub::<20>,
    stub::<21>, stub::<22>, stub::<23>, stub::<24>, stub::<25>, stub::<26>, stub::<27>,
    stub::<28>, stub::<29>, stub::<30>, stub::<31>, stub::<32>, stub::<33>, stub::<34>,
    stub::<35>, stub::<36>, stub::<37>, stub::<38>, stub::<39>, stub::<40>, stub::<41>,
    stub::<42>, stub::<43>, stub::<44>, stub::<45>, stub::<46>, stub::<47>, stub::<48>,
    stub::<49>, stub::<50>, stub::<51>, stub::<52>, stub::<53>, stub::<54>, stub::<55>,
    stub::<56>, stub::<57>, stub::<58>, stub::<59>, stub::<60>, stub::<61>, stub::<62>,
    stub::<63>, stub::<64>, stub::<65>, stub::<66>, stub::<67>, stub::<68>, stub::<69>,
    stub::<70>, stub::<71>, stub::<72>, stub::<73>, stub::<74>, stub::<75>, stub::<76>,
    stub::<77>, stub::<78>, stub::<79>, stub::<80>, stub::<81>, stub::<82>, stub::<83>,
    stub::<84>, stub::<85>, stub::<86>, stub::<87>, stub::<88>, stub::<89>, stub::<90>,
    stub::<91>, stub::<92>, stub::<93>, stub::<94>, stub::<95>,
];

extern "C" fn stub<const INDEX: usize>() -> Return {
    not_supported(&format!("entry {INDEX} of an export table"))
}

extern "C" fn succeed() -> Return {
    0
}

extern "C" fn accept_size(_bytes: usize) -> Return {
    0
}

extern "C" fn load_wrapped(module: OutPtr<Handle>, image: *const c_void) -> Return {
    answer(|| module::load(module, image))
}

extern "C" fn load_wrapped_with_options(
    module: OutPtr<Handle>,
    image: *const c_void,
    _options: *const c_void,
    _values: *const c_void,
    _count: c_uint,
) -> Return {
    answer(|| module::load(module, image))
}

extern "C" fn load_with_options(
    image: *const c_void,
    module: OutPtr<Handle>,
    _options: *const c_void,
    _values: *const c_void,
    _count: c_uint,
) -> Return {
    answer(|| module::load(module, image))
}

/// Returns the handle that the primary context has or will have.
extern "C" fn primary_context(context: OutPtr<Handle>, device: Device) -> Return {
    answer(|| context.set(context::primary_handle(crate::device::gpu(device)?)))
}

extern "C" fn current_context(context: OutPtr<Handle>) -> Return {
    answer(|| context.set(current().unwrap_or(Handle::NULL)))
}

extern "C" fn callback_sites(sites: OutPtr<*mut u32>, bytes: OutPtr<usize>) {
    let _ = give_zeroes::<1024>(sites, bytes);
}

extern "C" fn callback_flags(flags: OutPtr<*mut u32>, bytes: OutPtr<usize>) {
    let _ = give_zeroes::<14>(flags, bytes);
}

/// Gives the caller an array of its own, which it may write.
fn give_zeroes<const N: usize>(array: OutPtr<*mut u32>, bytes: OutPtr<usize>) -> CuResult {
    let zeroes: &'static mut [u32; N] = Box::leak(Box::new([0; N]));
    array.set(zeroes.as_mut_ptr())?;
    bytes.set(N * size_of::<u32>())
}

extern "C" fn put(
    context: Handle,
    key: usize,
    value: usize,
    destructor: Option<Destructor>,
) -> Return {
    answer(|| context_storage::put(context, key, value, destructor))
}

extern "C" fn delete(context: Handle, key: usize) -> Return {
    answer(|| context_storage::delete(context, key))
}

extern "C" fn get(value: OutPtr<usize>, context: Handle, key: usize) -> Return {
    answer(|| value.set(context_storage::get(context, key)?))
}

extern "C" fn check_context(
    _context: Handle,
    found: OutPtr<u32>,
    _detail: *mut *const c_void,
) -> Return {
    answer(|| found.set(0))
}

extern "C" fn check_integrity(version: u32, seconds: u64, result: OutPtr<[u64; 2]>) -> Return {
    answer(|| result.set(integrity::answer(version, seconds)?))
}

extern "C" fn context_number(context: Handle, number: OutPtr<u64>) -> Return {
    answer(|| number.set(context.0 as u64))
}

/// Returns an object of a stream, which only [`stream_number`] takes.
extern "C" fn stream_object(_context: Handle, stream: Handle, object: OutPtr<Handle>) -> Return {
    answer(|| object.set(stream))
}

/// Returns a number of a stream's object. Libraries continue with any.
extern "C" fn stream_number(_context: Handle, _object: Handle, number: OutPtr<u64>) -> Return {
    answer(|| number.set(0))
}

/// Calls a function for each function of a module. The fake knows those that were asked for, and
/// has one if there were none: the caller expects a module with one function.
///
/// Returns 1 for success, unlike all other entries: cuFFT takes any other answer for an error.
extern "C" fn each_function(
    _context: Handle,
    module: Handle,
    each: Option<extern "C" fn(*mut c_void, Handle)>,
    data: *mut c_void,
) -> Return {
    let found = each.ok_or(Status::InvalidValue).and_then(|each| {
        let functions = state::lock()?.functions_of(module)?;
        functions.into_iter().for_each(|function| each(data, function));
        Ok(())
    });
    Return::from(found.is_ok())
}
