//! Looks functions up in the ELF tables of loaded libraries.
//!
//! The loader's `dlsym` cannot find a driver's function: it is hooked, its result depends on its
//! caller, and for a preloaded library `RTLD_NEXT` is not the library that a program opened by
//! itself. The tables contain exactly the functions that one library defines.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;

use tessera_intercept_symbols::Library;

/// A library that is loaded.
#[derive(Clone, Copy)]
pub(crate) struct LoadedLibrary {
    base: usize,
    strings: *const c_char,
    symbols: *const libc::Elf64_Sym,
    gnu_hash: *const u32,
    hash: *const u32,
}

const DT_NULL: i64 = 0;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_SONAME: i64 = 14;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

/// Function that every proxy exports, and no driver.
pub(crate) const PROXY_MARK: &CStr = c"tessera_intercept_proxy";

struct Search<'a> {
    prefix: &'a [u8],
    found: Option<LoadedLibrary>,
}

impl LoadedLibrary {
    /// Returns the first loaded library whose soname has a prefix and that is no proxy.
    pub(crate) fn find(prefix: &[u8]) -> Option<Self> {
        let mut search = Search { prefix, found: None };
        // SAFETY: the callback gets the pointer that is passed here, while it is valid.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        search.found
    }

    /// Returns a library of the driver. Proxies, which have the same soname, are passed over.
    pub(crate) fn driver(library: Library) -> Option<Self> {
        Self::find(match library {
            Library::Cuda => b"libcuda.so.",
            Library::Nvml => b"libnvidia-ml.so.",
        })
    }

    /// Returns its base address, which changes if it is unloaded and loaded again.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// Returns the address of a function that it defines.
    pub(crate) fn function(&self, name: &CStr) -> Option<usize> {
        // SAFETY: the tables are those of a loaded library.
        let symbol = unsafe {
            if self.gnu_hash.is_null() { self.by_hash(name) } else { self.by_gnu_hash(name) }
        }?;
        Some(self.base + symbol.st_value as usize)
    }

    /// Returns the symbol at an index if it is a defined function of that name.
    ///
    /// # Safety
    /// The index is one of the symbol table.
    unsafe fn symbol_at(&self, index: u32, name: &CStr) -> Option<&'static libc::Elf64_Sym> {
        // SAFETY: by this function's contract; tables of a library that is in use are not unmapped.
        let symbol = unsafe { &*self.symbols.add(index as usize) };
        let is_function = symbol.st_info & 0xf == 2 && symbol.st_shndx != 0;
        // SAFETY: names are offsets into the string table, whose strings are terminated.
        let same = is_function
            && unsafe { CStr::from_ptr(self.strings.add(symbol.st_name as usize)) } == name;
        same.then_some(symbol)
    }

    /// # Safety
    /// `hash` is a SysV hash table.
    unsafe fn by_hash(&self, name: &CStr) -> Option<&'static libc::Elf64_Sym> {
        if self.hash.is_null() {
            return None;
        }
        // SAFETY: its second word is the number of symbols.
        let count = unsafe { *self.hash.add(1) };
        // SAFETY: indices below that number are in the table. (Rare, and once per function:
        // the chains are not needed.)
        (1..count).find_map(|index| unsafe { self.symbol_at(index, name) })
    }

    /// # Safety
    /// `gnu_hash` is a GNU hash table.
    unsafe fn by_gnu_hash(&self, name: &CStr) -> Option<&'static libc::Elf64_Sym> {
        let wanted = gnu_hash(name);
        // SAFETY: four words of header, then filter words of 64 bits, buckets, chains: as the
        // format says.
        unsafe {
            let (buckets, first, filters) =
                (*self.gnu_hash, *self.gnu_hash.add(1), *self.gnu_hash.add(2) as usize);
            if buckets == 0 {
                return None;
            }
            let bucket = self.gnu_hash.add(4 + filters * 2);
            let chain = bucket.add(buckets as usize);
            let mut index = *bucket.add((wanted % buckets) as usize);
            if index < first {
                return None;
            }
            loop {
                let hash = *chain.add((index - first) as usize);
                if hash | 1 == wanted | 1
                    && let Some(symbol) = self.symbol_at(index, name)
                {
                    return Some(symbol);
                }
                if hash & 1 == 1 {
                    return None;
                }
                index += 1;
            }
        }
    }
}

fn gnu_hash(name: &CStr) -> u32 {
    name.to_bytes()
        .iter()
        .fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)))
}

/// Visits one library; a result other than 0 ends the search.
unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
    // SAFETY: `LoadedLibrary::find` passes a `Search` that outlives the iteration, and the loader a
    // valid `info`.
    let (search, info) = unsafe { (&mut *data.cast::<Search<'_>>(), &*info) };
    // SAFETY: the loader describes a loaded library.
    match unsafe { describe(info) } {
        Some((library, soname))
            if soname.to_bytes().starts_with(search.prefix)
                && library.function(PROXY_MARK).is_none() =>
        {
            search.found = Some(library);
            1
        }
        _ => 0,
    }
}

/// # Safety
/// `info` describes a loaded library.
unsafe fn describe(info: &libc::dl_phdr_info) -> Option<(LoadedLibrary, &'static CStr)> {
    let base = info.dlpi_addr as usize;
    // The loader has turned addresses in the table into absolute ones, except where the table is
    // read-only.
    let pointer =
        |value: u64| if (value as usize) < base { base + value as usize } else { value as usize };
    // SAFETY: the program headers are there as long as the library is.
    let headers = unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let dynamic = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
    let mut entry = (base + dynamic.p_vaddr as usize) as *const Dynamic;
    let mut library = LoadedLibrary {
        base,
        strings: ptr::null(),
        symbols: ptr::null(),
        gnu_hash: ptr::null(),
        hash: ptr::null(),
    };
    let mut soname = None;
    loop {
        // SAFETY: the table ends with DT_NULL, after which nothing is read.
        let Dynamic { tag, value } = unsafe { &*entry };
        match *tag {
            DT_NULL => break,
            DT_STRTAB => library.strings = pointer(*value) as *const c_char,
            DT_SYMTAB => library.symbols = pointer(*value) as *const libc::Elf64_Sym,
            DT_GNU_HASH => library.gnu_hash = pointer(*value) as *const u32,
            DT_HASH => library.hash = pointer(*value) as *const u32,
            DT_SONAME => soname = Some(*value as usize),
            _ => {}
        }
        // SAFETY: there is an entry after one that is not DT_NULL.
        entry = unsafe { entry.add(1) };
    }
    if library.strings.is_null() || library.symbols.is_null() {
        return None;
    }
    // SAFETY: an offset into the string table, whose strings are terminated.
    Some((library, unsafe { CStr::from_ptr(library.strings.add(soname?)) }))
}
