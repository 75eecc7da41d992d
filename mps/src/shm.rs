//! Shared memory of one GPU's tenants: a tmpfs that they and their daemon have at `/dev/shm`.
//!
//! An MPS server and its clients map files of `/dev/shm`. Each GPU has a tmpfs of its own, so that
//! its tenants cannot see the files of another GPU's tenants.

use std::{fmt, io, path::Path, str::FromStr};

use tessera_api::quantity::Quantity;

use crate::tmpfs;

/// Maximum size of the tmpfs. No memory is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShmSize {
    /// Percent of the node's memory.
    Percent(u8),
    /// Bytes.
    Bytes(u64),
}

impl Default for ShmSize {
    /// Returns the kernel's default for a tmpfs.
    fn default() -> Self {
        Self::Percent(50)
    }
}

/// Error of an invalid size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid size: use a quantity such as 8Gi, a number of bytes, or 1% to 100% of the node's memory"
)]
pub struct ShmSizeError;

impl FromStr for ShmSize {
    type Err = ShmSizeError;

    fn from_str(text: &str) -> Result<Self, ShmSizeError> {
        if let Some(percent) = text.strip_suffix('%') {
            let percent = percent.parse().ok().filter(|percent| (1..=100).contains(percent));
            return percent.map(Self::Percent).ok_or(ShmSizeError);
        }
        // tmpfs reads 0 as "no limit".
        let bytes = Quantity::parse(text)
            .ok()
            .and_then(|quantity| quantity.bytes())
            .filter(|bytes| *bytes > 0);
        bytes.map(Self::Bytes).ok_or(ShmSizeError)
    }
}

impl fmt::Display for ShmSize {
    /// Writes the size as a tmpfs mount option has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Bytes(bytes) => write!(f, "{bytes}"),
        }
    }
}

/// Mounts the shared memory, unless it is mounted already.
///
/// # Errors
/// Returns the errors of [`tmpfs::mount`].
pub(crate) fn mount(target: &Path, size: ShmSize) -> io::Result<()> {
    // Mode of every /dev/shm: all users create files and remove their own.
    tmpfs::mount(target, &format!("size={size},mode=1777"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_quantity_bytes_or_percent() {
        for (text, size) in [
            ("50%", ShmSize::Percent(50)),
            ("8Gi", ShmSize::Bytes(8 << 30)),
            ("4096", ShmSize::Bytes(4096)),
        ] {
            assert_eq!(text.parse(), Ok(size));
        }
        assert_eq!(
            (ShmSize::Percent(50).to_string(), ShmSize::Bytes(4096).to_string()),
            ("50%".into(), "4096".into())
        );
        for text in ["", "0", "0%", "101%", "-1", "much", "%"] {
            assert_eq!(text.parse::<ShmSize>(), Err(ShmSizeError), "{text}");
        }
    }
}
