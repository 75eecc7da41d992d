//! What a CUDA context takes of a GPU's memory.

use std::{fmt, str::FromStr};

use tessera_api::quantity::{Quantity, QuantityError};

/// What a process may hold in bytes beyond what it is charged for: contexts and the code of
/// kernels, where its grant does not charge them. NVML has 0.3 to 0.6 GiB of them for one process
/// of today's frameworks.
pub const MOST_UNCHARGED: u64 = 1 << 30;

/// What a process is charged for each CUDA context that it begins, in bytes; 0 = nothing.
///
/// The CUDA driver takes this memory before a program has asked for any, and NVML counts it. How
/// much it is depends on the GPU, the driver's version and what of the driver a program uses, so
/// the operator says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextMemory(u64);

/// Why it is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContextMemoryError {
    /// It is no amount.
    #[error("it is no amount of memory: write 512Mi, or 0 to charge nothing")]
    Quantity(#[from] QuantityError),
    /// It is no number of MiB.
    #[error("it is no whole number of MiB: write 512Mi, or 0 to charge nothing")]
    NotMebibytes,
    /// More than contexts take.
    #[error(
        "it is more than {} MiB, which no context takes: amounts are in bytes, as 512Mi is",
        Self::MOST_MIB
    )]
    TooMuch,
}

impl ContextMemoryError {
    /// Ten times what contexts of today's GPUs take. More is a slip of the unit.
    const MOST_MIB: u64 = 8192;
}

const MIB: u64 = 1 << 20;

impl ContextMemory {
    /// In bytes; 0 = nothing is charged.
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
            (0, ..=ContextMemoryError::MOST_MIB) => Ok(Self(bytes)),
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
    fn amounts_of_whole_mebibytes_and_nothing_are_taken() {
        for (text, bytes, written) in
            [("0", 0, "0"), ("512Mi", 512 * MIB, "512Mi"), ("1Gi", 1024 * MIB, "1024Mi")]
        {
            let memory: ContextMemory = text.parse().expect(text);
            assert_eq!((memory.bytes(), memory.to_string().as_str()), (bytes, written));
        }
    }

    #[test]
    fn what_is_none_is_refused_with_what_to_write() {
        for text in ["", "half", "-1Mi", "512", "1.5", "500M", "512Gi"] {
            let error = text.parse::<ContextMemory>().expect_err(text).to_string();
            assert!(error.contains("512Mi"), "{text}: {error}");
        }
    }
}
