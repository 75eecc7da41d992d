//! GPU memory of a CUDA context.

use std::{fmt, str::FromStr};

use tessera_api::quantity::{Quantity, QuantityError};

/// Upper bound of the bytes that a process may hold uncharged: contexts and code of kernels, if its
/// grant does not charge them. NVML reports 0.3 to 0.6 GiB for one process of today's frameworks.
pub const MAX_UNCHARGED_BYTES: u64 = 1 << 30;

/// Memory charged to a process for each of its CUDA contexts, in bytes; 0 charges nothing.
///
/// The CUDA driver allocates this memory before a program allocates any, and NVML counts it. The
/// amount depends on the GPU, the driver's version and the used features, so the operator sets it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextMemory(u64);

/// Errors of parsing an amount of context memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContextMemoryError {
    /// The text is not a quantity.
    #[error("invalid quantity: use for example 512Mi, or 0 to charge nothing")]
    Quantity(#[from] QuantityError),
    /// The quantity is not a whole number of MiB.
    #[error("not a whole number of MiB: use for example 512Mi, or 0 to charge nothing")]
    NotMebibytes,
    /// The quantity is larger than any context.
    #[error(
        "more than {} MiB, larger than any CUDA context: use a unit, for example 512Mi",
        Self::MAX_MIB
    )]
    TooMuch,
}

impl ContextMemoryError {
    /// Ten times the size of contexts on today's GPUs. A larger value has a wrong unit.
    const MAX_MIB: u64 = 8192;
}

const MIB: u64 = 1 << 20;

impl ContextMemory {
    /// Returns the amount in bytes; 0 charges nothing.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ContextMemory {
    type Err = ContextMemoryError;

    fn from_str(text: &str) -> Result<Self, ContextMemoryError> {
        let bytes = Quantity::parse(text)?.bytes().ok_or(ContextMemoryError::NotMebibytes)?;
        match (bytes % MIB, bytes / MIB) {
            (0, ..=ContextMemoryError::MAX_MIB) => Ok(Self(bytes)),
            (0, _) => Err(ContextMemoryError::TooMuch),
            _ => Err(ContextMemoryError::NotMebibytes),
        }
    }
}

impl fmt::Display for ContextMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("0"),
            bytes => write!(f, "{}Mi", bytes / MIB),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_whole_mebibytes_and_zero() {
        for (text, bytes, written) in
            [("0", 0, "0"), ("512Mi", 512 * MIB, "512Mi"), ("1Gi", 1024 * MIB, "1024Mi")]
        {
            let memory: ContextMemory = text.parse().expect(text);
            assert_eq!((memory.bytes(), memory.to_string().as_str()), (bytes, written));
        }
    }

    #[test]
    fn refuses_other_text_with_an_example() {
        for text in ["", "half", "-1Mi", "512", "1.5", "500M", "512Gi"] {
            let error = text.parse::<ContextMemory>().expect_err(text).to_string();
            assert!(error.contains("512Mi"), "{text}: {error}");
        }
    }
}
