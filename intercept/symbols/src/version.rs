//! Versions of CUDA.

use core::fmt;

/// A version as CUDA counts it: 1000 x major + 10 x minor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SymbolVersion(pub u32);

impl fmt::Display for SymbolVersion {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}
