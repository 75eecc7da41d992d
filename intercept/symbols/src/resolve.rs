//! Result of `cuGetProcAddress`.

use crate::{Library, Symbol, SymbolVersion, TABLE};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
pub const PER_THREAD_STREAM: u64 = 2;

/// Reason for which no function is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// The driver has no function of that name.
    NoSuchName,
    /// It has, but none as old as what is asked for.
    TooNew,
}

/// The form of a function that a program built for that CUDA version expects, as a driver of that
/// version hands it out: the newest that is not newer; the one for the per-thread default stream
/// where flags ask for it and there is one. The empty name is `cuGetProcAddress` itself, in the
/// newest form that the driver has.
///
/// # Errors
/// See [`Missing`].
pub fn resolve(
    name: &str,
    version: SymbolVersion,
    flags: u64,
    driver: SymbolVersion,
) -> Result<&'static Symbol, Missing> {
    let (name, version) =
        if name.is_empty() { ("cuGetProcAddress", driver) } else { (name, version) };
    let known = || {
        let forms = TABLE.iter().filter(move |symbol| symbol.base.text == name);
        forms.filter(move |symbol| {
            symbol.library() == Library::Cuda && symbol.is_exported_by(driver)
        })
    };
    if known().next().is_none() {
        return Err(Missing::NoSuchName);
    }
    let newest = |special: bool| {
        let fitting = known()
            .filter(|symbol| symbol.variant.is_some() == special && symbol.version <= version);
        fitting.max_by_key(|symbol| symbol.version)
    };
    let special = if flags & PER_THREAD_STREAM != 0 { newest(true) } else { None };
    special.or_else(|| newest(false)).ok_or(Missing::TooNew)
}
