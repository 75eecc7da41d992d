//! MIG (Multi-Instance GPU): the profiles of a GPU in MIG mode, and instances that exist.

use std::collections::BTreeMap;

use super::Gpu;
use crate::names::{MigDeviceName, capacity};

/// A GPU in MIG mode. All of it is data of NVML: profiles differ between products and drivers.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mig {
    /// Profiles of GPU instances. Empty if the driver was told to leave MIG alone.
    pub profiles: Vec<MigProfile>,
    /// GPU instances that exist. In the inventory that is published, those that no claim of this
    /// node has: they are left as they are.
    pub instances: Vec<MigInstance>,
}

/// A profile: the size of GPU instances.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigProfile {
    /// NVML's ID of the profile, such as 19.
    pub id: u32,
    /// Name as NVIDIA writes it, such as `1g.10gb` or `1g.10gb+me`.
    pub name: String,
    /// Compute slices.
    pub slices: u32,
    /// Memory in MiB. Less than its memory slices of the GPU's memory.
    pub memory_mib: u64,
    /// Engines by kind.
    pub engines: MigEngines,
    /// Placements that the GPU offers.
    pub placements: Vec<MigPlacement>,
}

/// Number of engines of a GPU instance, or of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigEngines {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// Video decoders.
    pub decoders: u32,
    /// Video encoders.
    pub encoders: u32,
    /// JPEG engines.
    pub jpeg_engines: u32,
    /// Optical flow engines.
    pub ofa_engines: u32,
}

/// Memory slices of a GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigPlacement {
    /// First memory slice.
    pub start: u32,
    /// Number of memory slices.
    pub size: u32,
}

/// A GPU instance that exists.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigInstance {
    /// ID of its profile.
    pub profile: u32,
    /// Its memory slices.
    pub placement: MigPlacement,
}

impl MigEngines {
    /// Returns the numbers by the name of their capacity.
    pub fn by_name(&self) -> [(&'static str, u32); 6] {
        let numbers = [
            self.multiprocessors,
            self.copy_engines,
            self.decoders,
            self.encoders,
            self.jpeg_engines,
            self.ofa_engines,
        ];
        std::array::from_fn(|i| (capacity::ENGINES[i].0, numbers[i]))
    }
}

impl MigPlacement {
    /// Returns true if a memory slice is in both.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// Returns the memory slice after the last one.
    pub fn end(&self) -> u32 {
        self.start.saturating_add(self.size)
    }
}

impl Mig {
    /// Returns the profile with this ID.
    pub fn profile(&self, id: u32) -> Option<&MigProfile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// Returns the placement of a profile that starts at this memory slice.
    pub fn placement(&self, profile: u32, start: u32) -> Option<MigPlacement> {
        let mut placements = self.profile(profile)?.placements.iter();
        placements.find(|placement| placement.start == start).copied()
    }

    /// Returns the number of memory slices of the GPU.
    pub fn memory_slices(&self) -> u32 {
        let placements = self.profiles.iter().flat_map(|profile| &profile.placements);
        placements.map(MigPlacement::end).max().unwrap_or(0)
    }

    /// Returns the engines of the GPU by the name of their capacity: those of the profile with the
    /// most.
    pub fn engines(&self) -> BTreeMap<&'static str, u32> {
        let mut most = BTreeMap::new();
        for (name, number) in self.profiles.iter().flat_map(|profile| profile.engines.by_name()) {
            let entry = most.entry(name).or_insert(0);
            *entry = number.max(*entry);
        }
        most
    }

    /// Returns an existing instance that has a memory slice of this placement.
    pub fn instance_at(&self, placement: &MigPlacement) -> Option<&MigInstance> {
        self.instances.iter().find(|instance| instance.placement.overlaps(placement))
    }
}

impl Gpu {
    /// Returns the name of the MIG device of a profile and placement of this GPU.
    pub fn mig_device_name(&self, profile: &MigProfile, placement: &MigPlacement) -> MigDeviceName {
        MigDeviceName::new(self.uuid.clone(), &profile.name, profile.id, placement.start)
    }
}
