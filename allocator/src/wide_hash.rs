//! Hash that is compared instead of a state.

/// A hash that is compared instead of the state.
///
/// For 2^18 states the probability of a collision is below 2^-92.
pub(crate) type WideHash = u128;

/// Returns the hash of a sequence.
pub(crate) fn hash_all(values: impl Iterator<Item = u128>) -> WideHash {
    values.fold(11, mix)
}

/// Mixes a value into a hash.
///
/// Two rounds of multiplication over both halves, as in wyhash and foldhash.
pub(crate) fn mix(hash: WideHash, value: u128) -> WideHash {
    const K: [u64; 4] = [
        0x9e37_79b9_7f4a_7c15,
        0xbf58_476d_1ce4_e5b9,
        0x94d0_49bb_1331_11eb,
        0xd6e8_feb8_6659_fd93,
    ];
    let halves = |wide: u128| (wide as u64, (wide >> 64) as u64);
    let fold = |a: u64, b: u64| {
        let (low, high) = halves(u128::from(a) * u128::from(b));
        low ^ high
    };
    let ((h0, h1), (v0, v1)) = (halves(hash), halves(value));
    let a = fold(h0 ^ v0 ^ K[0], h1.rotate_left(23) ^ v1 ^ K[1]);
    let b = fold(h1 ^ v0.rotate_left(32) ^ K[2], h0.rotate_left(41) ^ v1 ^ K[3]);
    let c = fold(a ^ K[3], b ^ K[0]);
    let d = fold(b.rotate_left(17) ^ K[1] ^ h1, a ^ K[2] ^ v0);
    u128::from(c.wrapping_add(h0.rotate_left(7))) | (u128::from(d ^ a) << 64)
}
