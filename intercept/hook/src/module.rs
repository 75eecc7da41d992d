//! Images of modules: their code and variables lie in memory of the GPU.
//!
//! How much that is the driver does not say, so the image is asked: its sections that are to lie in
//! memory, with those that take no room in the file; of several images in one, the largest. Code
//! that the driver loads only when it is used is charged with its module all the same.
//!
//! Libraries are loaded when a kernel of them is first used, unless the program wants otherwise
//! (`CUDA_MODULE_LOADING`). They are not charged, since they take what the program uses of them,
//! and never refused: the CUDA runtime remembers the failure for the life of the process. Only
//! large variables, which a program could take for memory, are charged at once.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::charge::{charged, discharged};
use crate::compute;
use crate::cuda::{self, Handle, SUCCESS};
use crate::route::hooks;
use crate::state::Kind;
use crate::sys::{self, HERE};

/// Reads a number at an offset.
///
/// # Safety
/// It lies in an image that the driver is to read too.
unsafe fn at<T: Copy>(image: *const u8, offset: usize) -> T {
    // SAFETY: by this function's contract.
    unsafe { image.add(offset).cast::<T>().read_unaligned() }
}

/// What of an image is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// What lies in memory once it is loaded.
    All,
    /// Its variables.
    Variables,
}

impl Part {
    /// Whether a section of an ELF file is counted, by its type and flags.
    fn has(self, kind: u32, flags: u64) -> bool {
        /// `SHT_NOBITS`
        const NO_CONTENT: u32 = 8;
        /// `SHF_WRITE`, `SHF_ALLOC` and `SHF_INFO_LINK`
        const WRITABLE: u64 = 1;
        const IN_MEMORY: u64 = 2;
        const OF_ANOTHER: u64 = 0x40;
        // Shared memory of a kernel, `.nv.shared.*`: it lies in the multiprocessors.
        let is_shared = kind == NO_CONTENT && flags & OF_ANOTHER != 0;
        let counts = self == Self::All || flags & WRITABLE != 0;
        flags & IN_MEMORY != 0 && !is_shared && counts
    }
}

/// Bytes of an image in the GPU's memory.
///
/// # Safety
/// `image` is NULL or an image that the driver is to read: a text, an ELF file, several of them in
/// one, or what holds these.
unsafe fn bytes_of(image: *const c_void, part: Part) -> u64 {
    /// What `__fatBinC_Wrapper_t` begins with, where it holds the pointer, and what that leads to.
    const WRAPPER: u32 = 0x4662_43b1;
    const WRAPPED_AT: usize = 8;
    const SEVERAL: u32 = 0xba55_ed50;
    const ELF: u32 = u32::from_le_bytes(*b"\x7fELF");
    let image = image.cast::<u8>();
    if image.is_null() || is_short(image) {
        return 0;
    }
    // SAFETY: by this function's contract; it has four bytes.
    match unsafe { at::<u32>(image, 0) } {
        // SAFETY: a wrapper holds a pointer.
        WRAPPER => unsafe { bytes_of(at(image, WRAPPED_AT), part) },
        // SAFETY: by this function's contract.
        SEVERAL => unsafe { largest(image, part) },
        // SAFETY: by this function's contract.
        ELF => unsafe { sections(image, part) },
        _ if part == Part::Variables => 0,
        // SAFETY: what is none of these is a text.
        _ => unsafe { CStr::from_ptr(image.cast()) }.to_bytes().len() as u64,
    }
}

/// Whether it is a text that ends before four bytes: what begins the other images has no 0 in it.
fn is_short(image: *const u8) -> bool {
    // SAFETY: an image has one byte at least, and a text that has not ended has another.
    (0..4).any(|offset| unsafe { image.add(offset).read() } == 0)
}

/// Bytes of an ELF file's sections that are to lie in memory.
///
/// # Safety
/// It is one.
unsafe fn sections(image: *const u8, part: Part) -> u64 {
    const OFFSET_AT: usize = 0x28;
    const LENGTH_AT: usize = 0x3a;
    const COUNT_AT: usize = 0x3c;
    const KIND_AT: usize = 4;
    const FLAGS_AT: usize = 8;
    const SIZE_AT: usize = 0x20;
    // SAFETY: the header of an ELF file.
    let (offset, length, count) = unsafe {
        (at::<u64>(image, OFFSET_AT), at::<u16>(image, LENGTH_AT), at::<u16>(image, COUNT_AT))
    };
    let size = |index: usize| {
        let section = offset as usize + index * usize::from(length);
        // SAFETY: the header says that there are so many, there.
        let (kind, flags, size) = unsafe {
            (
                at::<u32>(image, section + KIND_AT),
                at::<u64>(image, section + FLAGS_AT),
                at::<u64>(image, section + SIZE_AT),
            )
        };
        if part.has(kind, flags) { size } else { 0 }
    };
    (0..usize::from(count)).map(size).fold(0, u64::saturating_add)
}

/// The largest of several images in one: the driver takes one of them.
///
/// # Safety
/// It is such a file.
unsafe fn largest(image: *const u8, part: Part) -> u64 {
    const HEADER_AT: usize = 6;
    const LENGTH_AT: usize = 8;
    // SAFETY: the header of such a file.
    let (header, length) = unsafe { (at::<u16>(image, HEADER_AT), at::<u64>(image, LENGTH_AT)) };
    let (mut entry, end) =
        (usize::from(header), usize::from(header).saturating_add(length as usize));
    let mut largest = 0;
    while entry < end {
        // SAFETY: entries follow each other up to the end.
        let (bytes, next) = unsafe { entry_of(image.add(entry), part) };
        largest = largest.max(bytes);
        if next == 0 {
            break;
        }
        entry = entry.saturating_add(next);
    }
    largest
}

/// Bytes of one of several images, and how far away the next is.
///
/// # Safety
/// It is the header of one.
unsafe fn entry_of(entry: *const u8, part: Part) -> (u64, usize) {
    const KIND_AT: usize = 0;
    const HEADER_AT: usize = 4;
    const LENGTH_AT: usize = 8;
    const UNPACKED_AT: usize = 56;
    /// An ELF file; the other kind is a text.
    const ELF: u16 = 2;
    // SAFETY: by this function's contract.
    let (kind, header, length) = unsafe {
        (at::<u16>(entry, KIND_AT), at::<u32>(entry, HEADER_AT), at::<u64>(entry, LENGTH_AT))
    };
    let has_unpacked = header as usize > UNPACKED_AT;
    // SAFETY: as above; the field is there where the header is long enough.
    let unpacked = if has_unpacked { unsafe { at::<u64>(entry, UNPACKED_AT) } } else { 0 };
    let bytes = match (kind, unpacked) {
        // SAFETY: it follows its header.
        (ELF, 0) => unsafe { sections(entry.add(header as usize), part) },
        // A text says nothing of its variables, nor does what is packed.
        _ if part == Part::Variables => 0,
        (_, 0) => length,
        (_, unpacked) => unpacked,
    };
    (bytes, (header as usize).saturating_add(length as usize))
}

/// Bytes of a file.
///
/// # Safety
/// `path` is NULL or a terminated string.
unsafe fn bytes_of_file(path: *const c_char) -> u64 {
    if path.is_null() {
        return 0;
    }
    // SAFETY: by this function's contract.
    sys::status(HERE, unsafe { CStr::from_ptr(path) }, 0).map_or(0, |status| status.length)
}

/// Loads a module or a library. Without a current context a library has no memory yet.
///
/// # Safety
/// `out` is where the driver is to put the handle.
unsafe fn load(
    bytes: u64,
    kind: Kind,
    out: *mut Handle,
    real: impl FnOnce() -> c_int,
    unload: fn(u64),
) -> c_int {
    if bytes == 0 || cuda::current_device().is_none() {
        return real();
    }
    // SAFETY: the driver has written there.
    charged(bytes, kind, real, || unsafe { out.read_unaligned() } as u64, unload)
}

/// Loads a library; `bytes` says how much a part of it takes.
///
/// # Safety
/// `out` is where the driver is to put the handle.
unsafe fn load_library(
    bytes: impl FnOnce(Part) -> u64,
    out: *mut Handle,
    real: impl FnOnce() -> c_int,
) -> c_int {
    /// Variables of less are not charged: a refusal would cost the program more.
    const LARGE: u64 = 16 << 20;
    let bytes = match cuda::loads_lazily() {
        true => Some(bytes(Part::Variables)).filter(|bytes| *bytes >= LARGE).unwrap_or(0),
        false => bytes(Part::All),
    };
    // SAFETY: by this function's contract.
    unsafe { load(bytes, Kind::Library, out, real, unload_library) }
}

fn unload_module(module: u64) {
    // SAFETY: it takes one handle; the program has not seen this one.
    unsafe { cuModuleUnload::ROUTE.give_back(module) };
}

fn unload_library(library: u64) {
    // SAFETY: it takes one handle; the program has not seen this one.
    unsafe { cuLibraryUnload::ROUTE.give_back(library) };
}

fn unloaded(result: c_int) -> c_int {
    if result == SUCCESS {
        compute::code_is_gone();
    }
    result
}

hooks! {
    fn cuModuleLoad(out: *mut Handle, path: *const c_char) |real| {
        // SAFETY: the program's own call.
        unsafe { load(bytes_of_file(path), Kind::Module, out, || real(out, path), unload_module) }
    }

    fn cuModuleLoadData(out: *mut Handle, image: *const c_void) |real| {
        // SAFETY: the program's own call.
        unsafe { load(bytes_of(image, Part::All), Kind::Module, out, || real(out, image), unload_module) }
    }

    fn cuModuleLoadDataEx(
        out: *mut Handle, image: *const c_void, count: c_uint, options: *mut c_int, values: *mut *mut c_void,
    ) |real| {
        // SAFETY: the program's own call.
        unsafe { load(bytes_of(image, Part::All), Kind::Module, out, || real(out, image, count, options, values), unload_module) }
    }

    fn cuModuleLoadFatBinary(out: *mut Handle, image: *const c_void) |real| {
        // SAFETY: the program's own call.
        unsafe { load(bytes_of(image, Part::All), Kind::Module, out, || real(out, image), unload_module) }
    }

    fn cuModuleUnload(module: Handle) |real| {
        // SAFETY: the program's own call.
        unloaded(discharged(Kind::Module, module as u64, || unsafe { real(module) }))
    }

    fn cuLibraryLoadData(
        out: *mut Handle, image: *const c_void, jit: *mut c_int, jit_values: *mut *mut c_void, jit_count: c_uint,
        options: *mut c_int, values: *mut *mut c_void, count: c_uint,
    ) |real| {
        // SAFETY: the program's own call.
        let load_it = || unsafe { real(out, image, jit, jit_values, jit_count, options, values, count) };
        // SAFETY: the program's own image.
        unsafe { load_library(|part| bytes_of(image, part), out, load_it) }
    }

    fn cuLibraryLoadFromFile(
        out: *mut Handle, path: *const c_char, jit: *mut c_int, jit_values: *mut *mut c_void, jit_count: c_uint,
        options: *mut c_int, values: *mut *mut c_void, count: c_uint,
    ) |real| {
        // SAFETY: the program's own call.
        let load_it = || unsafe { real(out, path, jit, jit_values, jit_count, options, values, count) };
        // Of a file, the length is known, and none of its variables.
        // SAFETY: the program's own path.
        let bytes = |part| if part == Part::All { unsafe { bytes_of_file(path) } } else { 0 };
        // SAFETY: the program's own call.
        unsafe { load_library(bytes, out, load_it) }
    }

    fn cuLibraryUnload(library: Handle) |real| {
        // SAFETY: the program's own call.
        unloaded(discharged(Kind::Library, library as u64, || unsafe { real(library) }))
    }
}
