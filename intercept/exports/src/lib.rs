//! Hides functions that a loaded library exports, so that the loader does not find them.
//!
//! A proxy of NVIDIA's library is built with every function of every release. A driver of an older
//! release has fewer, and programs depend on the result of `dlsym`. So a proxy, when it is loaded,
//! removes the functions that the driver does not have from its own symbol table. The loader
//! ignores a symbol without section and value.
//!
//! `no_std`, and it calls nothing but the kernel, because the interceptor's proxies use it.
#![no_std]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

/// ELF tables of a library.
struct Tables {
    strings: *const c_char,
    symbols: *mut libc::Elf64_Sym,
    hash: *const u32,
    /// Protection of the symbols' pages.
    protection: c_int,
}

/// Error of [`hide`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HideError {
    /// The address is in no loaded library, or the library has no GNU hash table.
    NoTables,
    /// The kernel does not allow to write to its pages.
    Protected,
}

/// Hides the functions for which `is_hidden` returns true, of the library that contains an address.
///
/// # Errors
/// See [`HideError`]; then nothing is hidden.
///
/// # Safety
/// No other thread looks symbols of that library up at the same time: it is called while the
/// library is initialized.
pub unsafe fn hide(
    inside: *const (),
    mut is_hidden: impl FnMut(&CStr) -> bool,
) -> Result<(), HideError> {
    let tables = Tables::around(inside as usize).ok_or(HideError::NoTables)?;
    // SAFETY: the tables are those of a loaded library.
    let count = unsafe { tables.count() };
    let page = page_length();
    let from = tables.symbols as usize / page * page;
    let to =
        (tables.symbols as usize + count * size_of::<libc::Elf64_Sym>()).next_multiple_of(page);
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    if !protect(from, to, writable) {
        return Err(HideError::Protected);
    }
    for index in 0..count {
        // SAFETY: one of `count` symbols, in writable pages, and by this function's contract no
        // other thread reads them now.
        let symbol = unsafe { &mut *tables.symbols.add(index) };
        let is_function = symbol.st_info & 0xf == 2 && symbol.st_shndx != 0;
        // SAFETY: names are offsets into the string table, whose strings are terminated.
        let name = || unsafe { CStr::from_ptr(tables.strings.add(symbol.st_name as usize)) };
        if is_function && is_hidden(name()) {
            symbol.st_shndx = 0;
            symbol.st_value = 0;
        }
    }
    protect(from, to, tables.protection);
    Ok(())
}

/// Returns the page size: kernels of arm64 have pages of 4 KiB or 64 KiB.
fn page_length() -> usize {
    // SAFETY: no pointers.
    match unsafe { libc::getauxval(libc::AT_PAGESZ) } {
        0 => 4096,
        length => length as usize,
    }
}

fn protect(from: usize, to: usize, protection: c_int) -> bool {
    // SAFETY: whole pages of a library that the caller may change.
    unsafe { libc::mprotect(from as *mut c_void, to - from, protection) == 0 }
}

struct Search {
    inside: usize,
    found: Option<Tables>,
}

impl Tables {
    /// Returns the tables of the library that contains an address.
    fn around(inside: usize) -> Option<Self> {
        let mut search = Search { inside, found: None };
        // SAFETY: the callback gets the pointer that is passed here, while it is valid.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        search.found
    }

    /// # Safety
    /// `info` describes a loaded library.
    unsafe fn of(info: &libc::dl_phdr_info, headers: &[libc::Elf64_Phdr]) -> Option<Self> {
        let base = info.dlpi_addr as usize;
        let pointer = |value: u64| {
            if (value as usize) < base { base + value as usize } else { value as usize }
        };
        let dynamic = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
        let mut entry = (base + dynamic.p_vaddr as usize) as *const Dynamic;
        let mut tables = Self {
            strings: ptr::null(),
            symbols: ptr::null_mut(),
            hash: ptr::null(),
            protection: 0,
        };
        loop {
            // SAFETY: the table ends with DT_NULL, after which nothing is read.
            let Dynamic { tag, value } = unsafe { &*entry };
            match *tag {
                DT_NULL => break,
                DT_STRTAB => tables.strings = pointer(*value) as *const c_char,
                DT_SYMTAB => tables.symbols = pointer(*value) as *mut libc::Elf64_Sym,
                DT_GNU_HASH => tables.hash = pointer(*value) as *const u32,
                _ => {}
            }
            // SAFETY: an entry follows one that is not DT_NULL.
            entry = unsafe { entry.add(1) };
        }
        let complete =
            !tables.strings.is_null() && !tables.symbols.is_null() && !tables.hash.is_null();
        let segment =
            headers.iter().find(|header| lies_in(header, base, tables.symbols as usize))?;
        tables.protection = [
            (libc::PF_R, libc::PROT_READ),
            (libc::PF_W, libc::PROT_WRITE),
            (libc::PF_X, libc::PROT_EXEC),
        ]
        .iter()
        .filter(|(flag, _)| segment.p_flags & flag != 0)
        .fold(0, |all, (_, protection)| all | protection);
        complete.then_some(tables)
    }

    /// Returns the number of symbols: one more than the last of the last chain.
    ///
    /// # Safety
    /// The tables are those of a loaded library.
    unsafe fn count(&self) -> usize {
        // SAFETY: four words of header, then filter words of 64 bits, buckets, chains: as the
        // format says.
        unsafe {
            let (buckets, first, filters) =
                (*self.hash as usize, *self.hash.add(1) as usize, *self.hash.add(2) as usize);
            let bucket = self.hash.add(4 + filters * 2);
            let chain = bucket.add(buckets);
            let mut last = (0..buckets).map(|at| *bucket.add(at) as usize).max().unwrap_or(0);
            if last < first {
                return first;
            }
            while *chain.add(last - first) & 1 == 0 {
                last += 1;
            }
            last + 1
        }
    }
}

fn lies_in(header: &libc::Elf64_Phdr, base: usize, address: usize) -> bool {
    let start = base + header.p_vaddr as usize;
    header.p_type == libc::PT_LOAD && (start..start + header.p_memsz as usize).contains(&address)
}

/// Visits one library; a result other than 0 ends the search.
unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
    // SAFETY: `Tables::around` passes a `Search` that outlives the iteration, and the loader a
    // valid `info`.
    let (search, info) = unsafe { (&mut *data.cast::<Search>(), &*info) };
    // SAFETY: the program headers are there as long as the library is.
    let headers = unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    if !headers.iter().any(|header| lies_in(header, info.dlpi_addr as usize, search.inside)) {
        return 0;
    }
    // SAFETY: the loader describes a loaded library.
    search.found = unsafe { Tables::of(info, headers) };
    1
}
