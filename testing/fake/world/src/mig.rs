//! MIG: the profiles of GPU models, and the instances of one GPU.
//!
//! The profiles are data ([`MigTable`]). The instances ([`MigState`]) are in a file of their own
//! ([`NodeMig`]): they are lost when the node is rebooted, IDs are used again, and each compute
//! instance gets a new UUID.

mod node;
mod table;

pub use node::NodeMig;
pub use table::{MigPlacement, MigProfile, MigTable};

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// The MIG instances of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct MigState {
    /// GPU instances.
    pub gpu_instances: Vec<GpuInstance>,
}

/// Returns a number that no instance had before, also before a reboot: the time in nanoseconds.
fn new_number() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// A GPU instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct GpuInstance {
    /// ID. The lowest unused one from 1, or 0 for the profile of the whole GPU.
    pub id: u32,
    /// Number that no other instance of the GPU ever had: a handle of a destroyed instance is not a
    /// handle of its successor.
    pub serial: u64,
    /// ID of its profile.
    pub profile: u32,
    /// First memory slice.
    pub start: u32,
    /// Its compute instances.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance: a MIG device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ComputeInstance {
    /// ID, unique in its GPU instance.
    pub id: u32,
    /// Compute slices.
    pub slices: u32,
    /// UUID with the prefix `MIG-`.
    pub uuid: String,
    /// True if a process uses it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub busy: bool,
}

/// Errors of changing instances. The names are NVML's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MigError {
    /// MIG mode is off, or the GPU has no such profile.
    #[error("not supported")]
    NotSupported,
    /// The placement is not one of the profile.
    #[error("invalid argument")]
    InvalidArgument,
    /// The placement or an engine is taken.
    #[error("insufficient resources")]
    InsufficientResources,
    /// There is no such instance.
    #[error("not found")]
    NotFound,
    /// The GPU instance has a compute instance, or the compute instance has a process.
    #[error("in use")]
    InUse,
    /// The caller may not change the machine: its files are read-only.
    #[error("no permission")]
    NoPermission,
}

impl MigState {
    /// Returns the GPU instance with this serial number.
    pub fn gpu_instance(&self, serial: u64) -> Option<&GpuInstance> {
        self.gpu_instances.iter().find(|instance| instance.serial == serial)
    }

    /// Returns the number of instances of a profile that could still be created.
    pub fn remaining(&self, table: &MigTable, profile: &MigProfile) -> u32 {
        let is_free = |placement: &&MigPlacement| self.fits(table, profile, placement.start);
        let free = profile.placements.iter().filter(is_free).count();
        u32::try_from(free).unwrap_or(u32::MAX).min(profile.max - self.count(profile.id))
    }

    /// Creates a GPU instance at a placement, or at the first free one. Returns its serial number.
    ///
    /// # Errors
    /// [`MigError`].
    pub fn create_gpu_instance(
        &mut self,
        table: &MigTable,
        profile: u32,
        start: Option<u32>,
    ) -> Result<u64, MigError> {
        let profile = table.profile(profile).ok_or(MigError::NotSupported)?;
        let has_start = |start| profile.placements.iter().any(|placement| placement.start == start);
        let start = match start {
            Some(start) if !has_start(start) => return Err(MigError::InvalidArgument),
            Some(start) => Some(start).filter(|start| self.fits(table, profile, *start)),
            None => {
                let mut starts = profile.placements.iter().map(|placement| placement.start);
                starts.find(|start| self.fits(table, profile, *start))
            }
        };
        let start = start.ok_or(MigError::InsufficientResources)?;
        let is_used = |id: u32| self.gpu_instances.iter().any(|instance| instance.id == id);
        let is_whole = profile.placements.iter().any(|place| place.size == table.memory_slices());
        let id = if is_whole { 0 } else { (1..).find(|id| !is_used(*id)).unwrap_or(0) };
        let serial = new_number();
        let instance = GpuInstance { id, serial, profile: profile.id, start, compute: Vec::new() };
        self.gpu_instances.push(instance);
        Ok(serial)
    }

    /// Destroys a GPU instance.
    ///
    /// # Errors
    /// [`MigError::NotFound`] or [`MigError::InUse`].
    pub fn destroy_gpu_instance(&mut self, serial: u64) -> Result<(), MigError> {
        let instance = self.gpu_instance(serial).ok_or(MigError::NotFound)?;
        if !instance.compute.is_empty() {
            return Err(MigError::InUse);
        }
        self.gpu_instances.retain(|instance| instance.serial != serial);
        Ok(())
    }

    /// Creates a compute instance of some slices in a GPU instance of `gpu`. Returns its UUID.
    ///
    /// # Errors
    /// [`MigError`].
    pub fn create_compute_instance(
        &mut self,
        table: &MigTable,
        gpu: &str,
        serial: u64,
        slices: u32,
    ) -> Result<String, MigError> {
        let number = new_number() & 0xffff_ffff_ffff;
        let mut instances = self.gpu_instances.iter_mut();
        let instance =
            instances.find(|instance| instance.serial == serial).ok_or(MigError::NotFound)?;
        let profile = table.profile(instance.profile).ok_or(MigError::NotSupported)?;
        let used: u32 = instance.compute.iter().map(|compute| compute.slices).sum();
        if slices == 0 || used + slices > profile.slices {
            return Err(MigError::InsufficientResources);
        }
        let is_used = |id: u32| instance.compute.iter().any(|compute| compute.id == id);
        let id = (0..).find(|id| !is_used(*id)).unwrap_or(0);
        // The GPU's UUID with another last group: `GPU-` and 23 of 36 characters.
        let uuid = format!("MIG-{}-{number:012x}", gpu.get(4..27).unwrap_or_default());
        let compute = ComputeInstance { id, slices, uuid: uuid.clone(), busy: false };
        instance.compute.push(compute);
        Ok(uuid)
    }

    /// Destroys a compute instance.
    ///
    /// # Errors
    /// [`MigError::NotFound`] or [`MigError::InUse`].
    pub fn destroy_compute_instance(&mut self, uuid: &str) -> Result<(), MigError> {
        let has_it = |instance: &&mut GpuInstance| {
            instance.compute.iter().any(|compute| compute.uuid == uuid)
        };
        let mut instances = self.gpu_instances.iter_mut();
        let instance = instances.find(has_it).ok_or(MigError::NotFound)?;
        if instance.compute.iter().any(|compute| compute.uuid == uuid && compute.busy) {
            return Err(MigError::InUse);
        }
        instance.compute.retain(|compute| compute.uuid != uuid);
        Ok(())
    }

    fn count(&self, profile: u32) -> u32 {
        let of_profile = |instance: &&GpuInstance| instance.profile == profile;
        u32::try_from(self.gpu_instances.iter().filter(of_profile).count()).unwrap_or(u32::MAX)
    }

    /// Returns true if memory slices, compute slices and engines are free.
    fn fits(&self, table: &MigTable, profile: &MigProfile, start: u32) -> bool {
        let Some(placement) = profile.placements.iter().find(|place| place.start == start) else {
            return false;
        };
        let taken = || {
            let instances = self.gpu_instances.iter();
            instances.filter_map(|instance| Some((table.profile(instance.profile)?, instance)))
        };
        let overlaps = |(other, instance): (&MigProfile, &GpuInstance)| {
            let other = other.placements.iter().find(|place| place.start == instance.start);
            other.is_some_and(|other| other.overlaps(placement))
        };
        let has_engines = |of: fn(&MigProfile) -> u32| {
            taken().map(|(other, _)| of(other)).sum::<u32>() + of(profile) <= table.most(of)
        };
        !taken().any(overlaps)
            && self.count(profile.id) < profile.max
            && has_engines(|profile| profile.slices)
            && has_engines(|profile| profile.multiprocessors)
            && has_engines(|profile| profile.copy_engines)
            && has_engines(|profile| profile.decoders)
            && has_engines(|profile| profile.jpeg_engines)
            && has_engines(|profile| profile.ofa_engines)
    }
}

#[cfg(test)]
mod tests;
