//! FNV-1a, for names; also part of the build script.

/// The hash of a name.
pub(crate) const fn hash(name: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut at = 0;
    while at < name.len() {
        hash = (hash ^ name[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    hash
}
