//! Names of the table.

use crate::hash::hash;

/// The hashes of all symbols and base names, sorted: a few pages without an address in them, where
/// the [table](crate::TABLE) would have the loader write to some hundred thousand bytes in every
/// process.
static NAMES: &[u64] = include!(concat!(env!("OUT_DIR"), "/names.rs"));

/// Returns true if a release has a function of this name, as a symbol or as a name for
/// `cuGetProcAddress`. It only decides if a function is counted as unknown: a collision of hashes
/// is harmless.
pub fn is_known(name: &[u8]) -> bool {
    NAMES.binary_search(&hash(name)).is_ok()
}

/// The hash of a name, for tables by name: FNV-1a.
pub const fn hash_of(name: &[u8]) -> u64 {
    hash(name)
}
