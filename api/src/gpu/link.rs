//! Links between two GPUs of a node.

use std::fmt;
use std::str::FromStr;

use crate::names::GpuUuid;

/// A link between two GPUs. Links have no direction: `a` is the lesser UUID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct Link {
    /// One end, the lesser UUID.
    pub a: GpuUuid,
    /// The other end.
    pub b: GpuUuid,
    /// Kind of the link.
    pub kind: LinkKind,
}

/// Connection of two GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub enum LinkKind {
    /// The closest PCIe ancestor that the two share. Farther levels are less.
    Pcie(PcieLevel),
    /// NVLink, directly or through switches; number of links.
    NvLink(u32),
}

/// Distance of two GPUs over PCIe, in the terms of `nvidia-smi topo -m`; closer is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub enum PcieLevel {
    /// `SYS`: across the interconnect of NUMA nodes.
    System,
    /// `NODE`: across host bridges within a NUMA node.
    Node,
    /// `PHB`: across one host bridge.
    HostBridge,
    /// `PXB`: across several PCIe switches.
    Multiple,
    /// `PIX`: across one PCIe switch.
    Single,
    /// `PSB`: on one board, across its own switch. `nvidia-smi` has no word for it; this is the one
    /// of NVIDIA's Go bindings.
    Board,
}

impl Link {
    /// A link; the ends may come in either order.
    pub fn new(one: GpuUuid, other: GpuUuid, kind: LinkKind) -> Self {
        let (a, b) = if one <= other { (one, other) } else { (other, one) };
        Self { a, b, kind }
    }

    /// The number of NVLinks; 0 if joined otherwise.
    pub fn nvlinks(&self) -> u32 {
        match self.kind {
            LinkKind::NvLink(count) => count,
            LinkKind::Pcie(_) => 0,
        }
    }

    pub(super) fn is_same_pair(&self, other: &Self) -> bool {
        self.a == other.a && self.b == other.b
    }
}

impl LinkKind {
    pub(super) fn is_same_medium(self, other: Self) -> bool {
        matches!((self, other), (Self::NvLink(_), Self::NvLink(_)) | (Self::Pcie(_), Self::Pcie(_)))
    }
}

impl PcieLevel {
    /// All levels, the farthest first.
    pub const ALL: [Self; 6] =
        [Self::System, Self::Node, Self::HostBridge, Self::Multiple, Self::Single, Self::Board];

    /// The word of `nvidia-smi topo -m`, and `PSB`.
    pub const fn word(self) -> &'static str {
        match self {
            Self::System => "SYS",
            Self::Node => "NODE",
            Self::HostBridge => "PHB",
            Self::Multiple => "PXB",
            Self::Single => "PIX",
            Self::Board => "PSB",
        }
    }
}

impl fmt::Display for PcieLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A text that is no PCIe level.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a PCIe level; known are SYS, NODE, PHB, PXB, PIX and PSB")]
pub struct UnknownPcieLevel(String);

impl FromStr for PcieLevel {
    type Err = UnknownPcieLevel;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|level| level.word() == text)
            .ok_or_else(|| UnknownPcieLevel(text.to_owned()))
    }
}
