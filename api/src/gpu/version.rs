//! Versions as NVIDIA writes them, made to fit the API, which takes only semver.

use std::fmt;

/// CUDA compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct ComputeCapability {
    /// Major, such as 9 for Hopper.
    pub major: u32,
    /// Minor.
    pub minor: u32,
}

/// A CUDA version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct CudaVersion {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
}

impl CudaVersion {
    /// From the number that CUDA and NVML use: 1000 times major plus 10 times minor, 13000 for
    /// 13.0.
    pub const fn from_number(number: u32) -> Self {
        Self { major: number / 1000, minor: number % 1000 / 10 }
    }

    /// As that number.
    pub const fn number(self) -> u32 {
        self.major * 1000 + self.minor * 10
    }
}

impl fmt::Display for ComputeCapability {
    /// As semver: `9.0.0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.0", self.major, self.minor)
    }
}

impl fmt::Display for CudaVersion {
    /// As semver: `13.0.0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.0", self.major, self.minor)
    }
}

/// Makes a version of NVIDIA's semver, which allows no leading zeros and needs three numbers:
/// `580.95.05` becomes `580.95.5` and `13.0` becomes `13.0.0`. A fourth number is dropped (semver
/// has no place where it would still count in comparisons), and so is what follows the numbers.
/// `None` if the text does not begin with a number.
pub fn normalise_version(text: &str) -> Option<semver::Version> {
    let text = text.trim();
    let numbers = &text[..text.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count()];
    let mut parts = numbers.trim_end_matches('.').split('.').map(|part| part.parse::<u64>().ok());
    let major = parts.next()??;
    let mut or_zero = || parts.next().map_or(Some(0), |part| part);
    let (minor, patch) = (or_zero()?, or_zero()?);
    Some(semver::Version::new(major, minor, patch))
}
