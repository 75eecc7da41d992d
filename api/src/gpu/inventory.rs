//! The GPUs of a node: published, not published, and how they are linked.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{Gpu, Link, MigInstance};
use crate::names::{GpuUuid, PciBusId};

/// The GPUs of a node. [`Inventory::new`] ensures the guarantees of the fields.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct Inventory {
    /// GPUs that are published: by index, each UUID once, all publishable. Those in MIG mode are
    /// published as MIG devices.
    pub gpus: Vec<Gpu>,
    /// Links between published GPUs that are shared: each pair and kind once, sorted.
    pub links: Vec<Link>,
    /// GPUs that are there, or were, and are not published.
    pub unpublished: Vec<Unpublished>,
}

/// A GPU that is not published.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Unpublished {
    /// Its UUID, where that could be read.
    pub uuid: Option<GpuUuid>,
    /// NVML's index, where it has one.
    pub index: Option<u32>,
    /// Its PCI address, where that could be read.
    pub pci_bus_id: Option<PciBusId>,
    /// The reason.
    pub reason: UnpublishedReason,
}

/// Reason for which a GPU is not published.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub enum UnpublishedReason {
    /// MIG mode is on.
    MigEnabled,
    /// The operator excluded it on this node.
    Excluded,
    /// It was there and is not any more (fell off the bus).
    Lost,
    /// NVML could not tell what must be known.
    Unreadable {
        /// The call that failed, such as `nvmlDeviceGetMemoryInfo`.
        call: String,
        /// NVML's error.
        error: String,
    },
    /// It says to have less than 2 MiB, the least that the capacity's request policy can express.
    NoMemory,
    /// Another GPU says to be the same one.
    DuplicateUuid,
    /// Another allocator allocates it too.
    OtherAllocator {
        /// The allocator, and how it was detected.
        allocator: String,
    },
    /// Containers that get it could not use it: the NVIDIA driver's files have no libcuda.
    NoCudaLibrary {
        /// Directory in which libcuda was searched.
        driver_root: String,
    },
}

impl UnpublishedReason {
    /// Returns true if an operator has to act: not for states that the operator has chosen.
    pub fn is_trouble(&self) -> bool {
        !matches!(self, Self::MigEnabled | Self::Excluded)
    }

    /// One stable word, for metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::MigEnabled => "MigEnabled",
            Self::Excluded => "Excluded",
            Self::Lost => "Lost",
            Self::Unreadable { .. } => "Unreadable",
            Self::NoMemory => "NoMemory",
            Self::DuplicateUuid => "DuplicateUuid",
            Self::OtherAllocator { .. } => "OtherAllocator",
            Self::NoCudaLibrary { .. } => "NoCudaLibrary",
        }
    }
}

impl fmt::Display for UnpublishedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MigEnabled => {
                f.write_str("MIG mode is on; turn it off (nvidia-smi -mig 0) to share the GPU, or publish MIG devices \
                             (--mig, driver.mig)")
            }
            Self::Excluded => f.write_str("excluded on this node (--exclude-gpu)"),
            Self::Lost => f.write_str("no longer answers; it may have fallen off the bus"),
            Self::Unreadable { call, error } => write!(f, "{call} failed with {error}"),
            Self::NoMemory => f.write_str("reports less than 2 MiB of memory"),
            Self::DuplicateUuid => f.write_str("reports the UUID of another GPU"),
            Self::OtherAllocator { allocator } => write!(
                f,
                "another allocator hands it out too: {allocator}. Take that one off this node, or leave the GPU to it \
                 (--exclude-gpu); --other-allocators=ignore if the two are kept apart in another way"
            ),
            Self::NoCudaLibrary { driver_root } => write!(
                f,
                "there is no libcuda.so.1 below {driver_root}, without which no container could use it: install the NVIDIA \
                 driver's CUDA libraries, or correct --driver-root (driver.nvidiaDriverRoot)"
            ),
        }
    }
}

impl Inventory {
    /// Sorts out what the hardware said: GPUs that cannot be published join `unpublished`, the
    /// others are put in order of their index, and links that end at no published GPU, or at
    /// the same one twice, are dropped.
    pub fn new(gpus: Vec<Gpu>, links: Vec<Link>, unpublished: Vec<Unpublished>) -> Self {
        let mut inventory = Self { gpus: Vec::new(), links, unpublished };
        let mut seen = BTreeSet::new();
        let mut gpus = gpus;
        gpus.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        for gpu in gpus {
            let reason = not_publishable(&gpu).or_else(|| {
                (!seen.insert(gpu.uuid.clone())).then_some(UnpublishedReason::DuplicateUuid)
            });
            match reason {
                Some(reason) => inventory.set_aside(&gpu, reason),
                None => inventory.gpus.push(gpu),
            }
        }
        inventory.tidy_links();
        inventory
    }

    /// The inventory without the GPUs that the operator excludes; they are listed as unpublished.
    #[must_use]
    pub fn excluding(self, excluded: &BTreeSet<GpuUuid>) -> Self {
        self.setting_aside(|gpu| {
            excluded.contains(&gpu.uuid).then_some(UnpublishedReason::Excluded)
        })
    }

    /// The inventory without the GPUs for which `reason` has one.
    #[must_use]
    pub fn setting_aside(mut self, reason: impl Fn(&Gpu) -> Option<UnpublishedReason>) -> Self {
        for gpu in std::mem::take(&mut self.gpus) {
            match reason(&gpu) {
                Some(reason) => self.set_aside(&gpu, reason),
                None => self.gpus.push(gpu),
            }
        }
        self.tidy_links();
        self
    }

    /// The published GPUs that are not in MIG mode: claims get shares of them.
    pub fn shared_gpus(&self) -> impl Iterator<Item = &Gpu> {
        self.gpus.iter().filter(|gpu| gpu.mig.is_none())
    }

    /// The published GPU of that UUID.
    pub fn gpu(&self, uuid: &GpuUuid) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == *uuid)
    }

    /// Returns the inventory without the GPU instances for which `is_own` returns true: claims have
    /// them.
    #[must_use]
    pub fn without_instances(mut self, is_own: impl Fn(&GpuUuid, &MigInstance) -> bool) -> Self {
        for gpu in &mut self.gpus {
            let uuid = &gpu.uuid;
            if let Some(mig) = &mut gpu.mig {
                mig.instances.retain(|instance| !is_own(uuid, instance));
            }
        }
        self
    }

    /// Returns the number of unpublished GPUs by the code of the reason.
    pub fn unpublished_by_reason(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for gpu in &self.unpublished {
            *counts.entry(gpu.reason.code()).or_default() += 1;
        }
        counts
    }

    fn set_aside(&mut self, gpu: &Gpu, reason: UnpublishedReason) {
        self.unpublished.push(Unpublished {
            uuid: Some(gpu.uuid.clone()),
            index: Some(gpu.index),
            pci_bus_id: Some(gpu.pci_bus_id.clone()),
            reason,
        });
    }

    fn tidy_links(&mut self) {
        // MIG devices have no peer access (MIG user guide, "Limitations").
        let published: BTreeSet<GpuUuid> = self.shared_gpus().map(|gpu| gpu.uuid.clone()).collect();
        self.links.retain(|link| {
            link.a != link.b && published.contains(&link.a) && published.contains(&link.b)
        });
        self.links.sort();
        // Sorted by pair, then kind: of two links of one pair and medium the larger kind comes last
        // and is kept.
        self.links.reverse();
        self.links.dedup_by(|later, kept| {
            later.is_same_pair(kept) && later.kind.is_same_medium(kept.kind)
        });
        self.links.reverse();
    }
}

/// Returns the reason for which a GPU cannot be published, if there is one.
fn not_publishable(gpu: &Gpu) -> Option<UnpublishedReason> {
    if gpu.mig.as_ref().is_some_and(|mig| mig.profiles.is_empty()) {
        return Some(UnpublishedReason::MigEnabled);
    }
    // validRange wants min + step <= value (API validation of requestPolicy), and both are 1Mi.
    (gpu.memory_mib() < 2).then_some(UnpublishedReason::NoMemory)
}
