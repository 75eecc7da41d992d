//! Tables of MIG profiles.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use serde::Deserialize;

/// The MIG profiles of a GPU model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigTable {
    /// The profiles.
    pub profiles: Vec<MigProfile>,
}

/// A profile of GPU instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigProfile {
    /// ID, such as 19.
    pub id: u32,
    /// Value of `NVML_GPU_INSTANCE_PROFILE_*`, such as 0 for `1_SLICE`.
    pub kind: u32,
    /// Name, such as `1g.10gb`.
    pub name: String,
    /// Compute slices.
    pub slices: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// Video decoders.
    pub decoders: u32,
    /// JPEG engines.
    pub jpeg_engines: u32,
    /// Optical flow engines.
    pub ofa_engines: u32,
    /// Maximum number of instances.
    pub max: u32,
    /// Possible placements.
    pub placements: Vec<MigPlacement>,
}

/// Memory slices of a GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigPlacement {
    /// First memory slice.
    pub start: u32,
    /// Number of memory slices.
    pub size: u32,
}

impl MigPlacement {
    /// Returns true if a memory slice is in both.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.start < other.start + other.size && other.start < self.start + self.size
    }
}

impl MigTable {
    /// Returns the table of a model, such as `h100-80gb`.
    pub fn of_model(name: &str) -> Option<Arc<Self>> {
        TABLES.get(name).cloned()
    }

    /// Returns the names of the models.
    pub fn models() -> impl Iterator<Item = &'static str> {
        TABLES.keys().map(String::as_str)
    }

    /// Returns the profile with this ID.
    pub fn profile(&self, id: u32) -> Option<&MigProfile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// Returns the profile of a value of `NVML_GPU_INSTANCE_PROFILE_*`.
    pub fn profile_of_kind(&self, kind: u32) -> Option<&MigProfile> {
        self.profiles.iter().find(|profile| profile.kind == kind)
    }

    /// Returns the number of memory slices of the GPU.
    pub fn memory_slices(&self) -> u32 {
        let placements = self.profiles.iter().flat_map(|profile| &profile.placements);
        placements.map(|placement| placement.start + placement.size).max().unwrap_or(0)
    }

    /// Returns the GPU's amount of a resource: that of the profile with the most.
    pub(super) fn most(&self, of: fn(&MigProfile) -> u32) -> u32 {
        self.profiles.iter().map(of).max().unwrap_or(0)
    }
}

static TABLES: LazyLock<BTreeMap<String, Arc<MigTable>>> = LazyLock::new(|| {
    let file: TablesFile = serde_saphyr::from_str(include_str!("tables.yaml"))
        .expect("invariant: the tables are part of the program");
    file.models.iter().map(|(name, model)| (name.clone(), Arc::new(file.table(model)))).collect()
});

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TablesFile {
    layouts: BTreeMap<String, Vec<LayoutRow>>,
    models: BTreeMap<String, ModelRows>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LayoutRow {
    id: u32,
    kind: u32,
    slices: u32,
    size: u32,
    starts: Vec<u32>,
    max: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelRows {
    layout: String,
    profiles: BTreeMap<u32, ProfileRow>,
}

/// Name, memory in MiB, multiprocessors, copy engines, decoders, JPEG engines, OFA engines.
type ProfileRow = (String, u64, u32, u32, u32, u32, u32);

impl TablesFile {
    fn table(&self, model: &ModelRows) -> MigTable {
        let profile = |row: &LayoutRow| {
            let (name, memory_mib, multiprocessors, copy_engines, decoders, jpeg, ofa) =
                model.profiles[&row.id].clone();
            let placement = |start: &u32| MigPlacement { start: *start, size: row.size };
            MigProfile {
                id: row.id,
                kind: row.kind,
                name,
                slices: row.slices,
                memory_mib,
                multiprocessors,
                copy_engines,
                decoders,
                jpeg_engines: jpeg,
                ofa_engines: ofa,
                max: row.max,
                placements: row.starts.iter().map(placement).collect(),
            }
        };
        MigTable { profiles: self.layouts[&model.layout].iter().map(profile).collect() }
    }
}
