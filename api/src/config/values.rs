//! The values that the fields of a `GpuConfig` take.

use std::fmt;
use std::str::FromStr;

/// Defines the values of a field: an enum with the word and the documentation of each value.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[doc = $meaning:literal])+ $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[doc = $meaning])+ $variant),+
        }

        impl $name {
            /// All values, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Returns the value as it is written in a manifest.
            pub const fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }

            /// Returns the documentation of the value.
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$variant => concat!($($meaning),+)),+
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.word())
            }
        }

        impl FromStr for $name {
            type Err = UnknownWord;

            fn from_str(text: &str) -> Result<Self, UnknownWord> {
                let found = Self::ALL.iter().find(|value| value.word() == text);
                found.copied().ok_or_else(|| {
                    let words: Vec<_> = Self::ALL.iter().map(|value| value.word()).collect();
                    UnknownWord { allowed: words.join(", ") }
                })
            }
        }
    };
}

/// A text that is no value of a field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected one of {allowed}")]
pub struct UnknownWord {
    allowed: String,
}

words! {
    /// `placement.node` and `placement.device`: preference among the nodes or GPUs that fit.
    PlacementPolicy {
        /// Minimizes the capacity that becomes unusable for the requests that are expected.
        LeastFragmentation = "LeastFragmentation",
        /// Prefers the fullest, so that whole GPUs and nodes stay free.
        Binpack = "Binpack",
        /// Prefers the emptiest.
        Spread = "Spread",
        /// Prefers the least loaded, by the utilization that NVML measures.
        LeastLoaded = "LeastLoaded",
        /// Chooses at random.
        Random = "Random",
    }
}

words! {
    /// `topology[].scope`: the connection that the GPUs of one request have in common.
    TopologyScope {
        /// Each GPU is connected to each other one by NVLink.
        NvLink = "NVLink",
        /// All GPUs are below one PCIe root complex.
        Pcie = "PCIe",
        /// All GPUs are on one NUMA node.
        Numa = "NUMA",
    }
}

words! {
    /// `topology[].mode`: strictness of the term.
    TopologyMode {
        /// GPUs with the connection are preferred.
        Prefer = "Prefer",
        /// Without such GPUs the claim is pending.
        Require = "Require",
    }
}

words! {
    /// `compute.policy`: enforcement of a claim's `cores`.
    ComputePolicy {
        /// `cores` is a hard cap at all times.
        Fixed = "Fixed",
        /// `cores` is guaranteed; compute that other claims leave idle may be used as well, up to
        /// `limit`. Without `cores` nothing is guaranteed: the claim waits while others have work.
        Balance = "Balance",
        /// `cores` is reserved for placement only and not enforced.
        None = "None",
    }
}

words! {
    /// `compute.priority`: order in which claims of one GPU get its idle compute.
    ComputePriority {
        /// Before the others.
        High = "High",
        /// After `High`.
        Normal = "Normal",
        /// After `High` and `Normal`.
        Low = "Low",
    }
}

words! {
    /// `sharing`: the mechanism that enforces the shares.
    Sharing {
        /// Tessera's interceptor in the container.
        Intercept = "Intercept",
        /// Time slices of the GPU, without a limit of memory. Not supported in this version.
        TimeSlicing = "TimeSlicing",
        /// NVIDIA's Multi-Process Service, and the interceptor for memory.
        Mps = "MPS",
    }
}

/// A share in percent, 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Percent(u8);

impl Percent {
    /// Returns the share; `None` outside 1 to 100.
    pub const fn new(percent: u64) -> Option<Self> {
        if percent >= 1 && percent <= 100 { Some(Self(percent as u8)) } else { None }
    }

    /// Returns the percentage, 1 to 100.
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

/// A share of memory in percent with up to two decimals, 0.01 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryPercent {
    /// 1 to 10,000.
    hundredths: u16,
}

impl MemoryPercent {
    /// The allowed values, for errors.
    pub const ALLOWED: &str = "0.01 to 100, with up to two decimals";

    /// Returns the share of that many hundredths of a percent; `None` outside 1 to 10,000.
    pub const fn from_hundredths(hundredths: u64) -> Option<Self> {
        if hundredths >= 1 && hundredths <= 10_000 {
            Some(Self { hundredths: hundredths as u16 })
        } else {
            None
        }
    }

    /// Returns the share in hundredths of a percent, 1 to 10,000.
    pub const fn hundredths(self) -> u16 {
        self.hundredths
    }

    /// Returns that share of `mib` in MiB: rounded down, so that shares that add up to 100 always
    /// fit together, and at least 1.
    pub const fn of_mib(self, mib: u64) -> u64 {
        let share = (mib as u128 * self.hundredths as u128 / 10_000) as u64;
        if share == 0 { 1 } else { share }
    }
}

impl FromStr for MemoryPercent {
    type Err = UnknownWord;

    /// Parses a decimal number such as `25` or `33.33`, without sign and exponent.
    fn from_str(text: &str) -> Result<Self, UnknownWord> {
        let parse = || {
            let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
            let significant = decimals.trim_end_matches('0');
            let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
            if whole.is_empty() || decimals.is_empty() || significant.len() > 2 {
                return None;
            }
            if !is_digits(whole) || !is_digits(decimals) {
                return None;
            }
            let whole: u64 = whole.parse().ok()?;
            let hundredths: u64 = format!("{significant:0<2}").parse().ok()?;
            Self::from_hundredths(whole.checked_mul(100)?.checked_add(hundredths)?)
        };
        parse().ok_or_else(|| UnknownWord { allowed: Self::ALLOWED.to_owned() })
    }
}

impl fmt::Display for MemoryPercent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, decimals) = (self.hundredths / 100, self.hundredths % 100);
        match decimals {
            0 => write!(f, "{whole}%"),
            tenths if tenths % 10 == 0 => write!(f, "{whole}.{}%", tenths / 10),
            hundredths => write!(f, "{whole}.{hundredths:02}%"),
        }
    }
}
