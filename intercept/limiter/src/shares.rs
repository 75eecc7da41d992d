//! Adds up several grants of one GPU.

use crate::account::Refused;

/// One grant and its ledger, as this process uses them.
pub trait Share {
    /// Takes at least `least` and at most `most` bytes; returns their number.
    ///
    /// # Errors
    /// `least` bytes are not free, or the share cannot be used.
    fn take(&mut self, least: u64, most: u64) -> Result<u64, Refused>;

    /// Releases at most the bytes that this process holds; returns their number.
    fn give(&mut self, bytes: u64) -> u64;
}

/// Takes bytes of a GPU: from the first share that has them all, otherwise from several.
///
/// # Errors
/// The shares together have fewer bytes. Then nothing is taken.
pub fn reserve_across<S: Share>(shares: &mut [S], bytes: u64) -> Result<(), Refused> {
    let mut reason = Refused::Limit;
    for share in shares.iter_mut() {
        match share.take(bytes, bytes) {
            Ok(_) => return Ok(()),
            Err(Refused::Tampered) => reason = Refused::Tampered,
            Err(Refused::Limit) => {}
        }
    }
    if shares.len() < 2 {
        return Err(reason);
    }
    let mut missing = bytes;
    for share in shares.iter_mut() {
        missing -= share.take(1, missing).unwrap_or(0).min(missing);
        if missing == 0 {
            return Ok(());
        }
    }
    release_across(shares, bytes - missing);
    Err(reason)
}

/// Releases bytes of a GPU. The share that they were taken from does not matter: each gets back no
/// more than this process took of it.
pub fn release_across<S: Share>(shares: &mut [S], bytes: u64) {
    let mut left = bytes;
    for share in shares.iter_mut().rev() {
        left -= share.give(left).min(left);
        if left == 0 {
            return;
        }
    }
}
