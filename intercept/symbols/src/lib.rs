//! The functions of `libcuda.so.1` and `libnvidia-ml.so.1`, as data: facts of NVIDIA's headers of
//! CUDA 11.7 to 13.5.
//!
//! ```text
//!  NVIDIA's headers --generate.py--> symbols.txt --build.rs--> TABLE
//!                                                               |-- tessera-intercept-hook: functions that are hooked
//!                                                               |-- tessera-fake-cuda, -nvml: what is exported, since when
//!                                                               `-- tests: every function, every form, every query
//!                                   classes.txt (by hand) ---> CLASSES: the class of each function for the interceptor
//! ```
//!
//! * `symbols.txt` is the one list of names; its head says what the fields mean. `generate.py`
//!   writes it, and with `--check` compares it with the headers (which it fetches with pip, and
//!   which are not kept).
//! * `classes.txt` says of every function if the interceptor hooks it, and the reason if not. A
//!   function without a class fails a test: so that a new CUDA release is looked at before it is
//!   let through.
//!
//! **A new CUDA release:** add its line to `RELEASES` in `generate.py`, run it, and give a class to
//! every name that the tests then complain of. Nothing else lists the driver's functions.
//!
//! Constants only: what uses one entry in a constant has nothing else of the table in its binary.
#![no_std]
#![forbid(unsafe_code)]

mod class;
mod hash;
mod names;
mod resolve;
mod version;

use core::ffi::CStr;
use core::fmt;

pub use class::{CLASSES, Class, Classified, class_of};
pub use names::{hash_of, is_known};
pub use resolve::{Missing, PER_THREAD_STREAM, resolve};
pub use version::SymbolVersion;

/// A function that a library exports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Symbol {
    /// As it is exported.
    pub symbol: Name,
    /// The name that `cuGetProcAddress` knows it by. For NVML, which has nothing of the kind, the
    /// symbol without its `_v2`.
    pub base: Name,
    /// The CUDA version that brought this form of it; 0 for NVML.
    pub version: SymbolVersion,
    /// For the per-thread default stream.
    pub variant: Option<Variant>,
    /// The first release whose header declares it; the [oldest](RELEASES) also stands for all
    /// before it.
    pub first: SymbolVersion,
    /// The last release whose header declares it. Drivers keep functions that headers have
    /// dropped.
    pub last: SymbolVersion,
    /// A letter for each: `p` pointer, `h` opaque handle, `i` integer of at most 32 bits, `l`
    /// integer of 64 bits, `f` float, `s` structure by value.
    pub parameters: &'static str,
}

/// A name, for Rust and for C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// It.
    pub text: &'static str,
    /// It, terminated.
    pub c: &'static CStr,
}

impl fmt::Display for Name {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.pad(self.text)
    }
}

/// A form for the per-thread default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Of a function without a stream.
    Ptds,
    /// Of a function that takes a stream.
    Ptsz,
}

impl Variant {
    /// As it ends symbols, after an underscore.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ptds => "ptds",
            Self::Ptsz => "ptsz",
        }
    }
}

/// A library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// `libcuda.so.1`
    Cuda,
    /// `libnvidia-ml.so.1`
    Nvml,
}

/// Every function, sorted by its symbol.
pub const TABLE: &[Symbol] = include!(concat!(env!("OUT_DIR"), "/table.rs"));

/// The CUDA releases whose headers the table is made of, from the oldest on.
pub const RELEASES: &[SymbolVersion] = include!(concat!(env!("OUT_DIR"), "/releases.rs"));

impl Symbol {
    /// The library that exports it.
    pub const fn library(&self) -> Library {
        if self.symbol.text.as_bytes()[0] == b'n' { Library::Nvml } else { Library::Cuda }
    }

    /// Returns true if the library of a driver for a CUDA version exports it.
    pub fn is_exported_by(&self, driver: SymbolVersion) -> bool {
        self.version <= driver && (self.first <= driver || self.first == RELEASES[0])
    }
}

/// The function with that symbol.
pub const fn find(symbol: &str) -> Option<Symbol> {
    let (mut from, mut to) = (0, TABLE.len());
    while from < to {
        let middle = from.midpoint(to);
        match compare(TABLE[middle].symbol.text.as_bytes(), symbol.as_bytes()) {
            0 => return Some(TABLE[middle]),
            1.. => to = middle,
            _ => from = middle + 1,
        }
    }
    None
}

/// As [`find`], for constants: a symbol that is not in the table does not compile.
pub const fn get(symbol: &str) -> Symbol {
    match find(symbol) {
        Some(found) => found,
        None => panic!("no release of CUDA exports that"),
    }
}

/// Negative, 0 or positive, as `memcmp`.
const fn compare(one: &[u8], other: &[u8]) -> isize {
    let mut at = 0;
    while at < one.len() && at < other.len() {
        if one[at] != other[at] {
            return one[at] as isize - other[at] as isize;
        }
        at += 1;
    }
    one.len() as isize - other.len() as isize
}
