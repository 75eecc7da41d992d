//! The shared memory of one GPU's tenants: a tmpfs that they and their daemon see at `/dev/shm`.
//!
//! An MPS server and its clients map files of `/dev/shm`. One tmpfs for each GPU, so that nobody
//! sees those of another GPU's tenants.

use std::{fmt, io, path::Path, str::FromStr};

use rustix::mount::MountFlags;
use tessera_api::quantity::Quantity;

use crate::tmpfs;

/// How much the tmpfs holds at most. Nothing is set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShmSize {
    /// Of the machine's memory, in percent.
    Percent(u8),
    /// In bytes.
    Bytes(u64),
}

impl Default for ShmSize {
    /// The kernel's own for a tmpfs.
    fn default() -> Self {
        Self::Percent(50)
    }
}

/// A size that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write an amount such as 8Gi, bytes, or a share of the machine's memory from 1% to 100%")]
pub struct ShmSizeError;

impl FromStr for ShmSize {
    type Err = ShmSizeError;

    fn from_str(text: &str) -> Result<Self, ShmSizeError> {
        if let Some(percent) = text.strip_suffix('%') {
            let percent = percent.parse().ok().filter(|percent| (1..=100).contains(percent));
            return percent.map(Self::Percent).ok_or(ShmSizeError);
        }
        // To tmpfs, 0 is without limit.
        let bytes = Quantity::parse(text)
            .ok()
            .and_then(|quantity| quantity.bytes())
            .filter(|bytes| *bytes > 0);
        bytes.map(Self::Bytes).ok_or(ShmSizeError)
    }
}

impl fmt::Display for ShmSize {
    /// As tmpfs reads it, too.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Bytes(bytes) => write!(f, "{bytes}"),
        }
    }
}

/// Mounts it, unless it is there.
///
/// # Errors
/// As [`tmpfs::mount`].
pub(crate) fn mount(target: &Path, size: ShmSize) -> io::Result<()> {
    // As /dev/shm is everywhere: anybody makes files there, and removes their own.
    tmpfs::mount(target, &format!("size={size},mode=1777"), MountFlags::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_an_amount_or_a_share_of_the_machines_memory() {
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
