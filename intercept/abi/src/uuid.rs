//! The identity of a GPU.

use core::fmt;
use core::str::FromStr;

/// A GPU's UUID as `cuDeviceGetUuid` gives it; NVML and Kubernetes write the same sixteen bytes as
/// `GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct GpuUuid(pub [u8; 16]);

/// The string is not `GPU-` and a UUID in lower or upper case hexadecimal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UuidError;

impl fmt::Display for UuidError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a GPU UUID of the form GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx")
    }
}

impl core::error::Error for UuidError {}

/// Places of the dashes in the 36 characters behind `GPU-`.
const DASHES: [usize; 4] = [8, 13, 18, 23];

impl FromStr for GpuUuid {
    type Err = UuidError;

    fn from_str(text: &str) -> Result<Self, UuidError> {
        let hex = text.strip_prefix("GPU-").ok_or(UuidError)?.as_bytes();
        if hex.len() != 36 {
            return Err(UuidError);
        }
        let mut bytes = [0; 16];
        let mut nibbles = 0;
        for (at, byte) in hex.iter().enumerate() {
            if DASHES.contains(&at) {
                if *byte != b'-' {
                    return Err(UuidError);
                }
                continue;
            }
            let digit = char::from(*byte).to_digit(16).ok_or(UuidError)?;
            let digit = u8::try_from(digit).map_err(|_| UuidError)?;
            bytes[nibbles / 2] = bytes[nibbles / 2] << 4 | digit;
            nibbles += 1;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
