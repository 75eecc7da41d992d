//! Instances of MIG devices: created at Prepare, destroyed at Unprepare.
//!
//! ```text
//! Started -> create GPU instance -> journal: its ID -> create compute instance -> journal: UUID
//!         -> CDI spec with capability devices -> Completed
//! ```
//!
//! NVML has no owner of an instance, so the journal says which ones are this driver's:
//!
//! * A claim in the journal has the memory slices of its devices: none was in use when its record
//!   was written.
//! * A process that dies between creating a GPU instance and recording its ID leaves one without
//!   compute instances. Nothing else leaves one: an instance with compute instances, and without
//!   its ID in the journal, belongs to another program and is left alone.
//! * IDs are used again. A recorded instance is the claim's only if it has the recorded UUID, which
//!   each creation changes.
//!
//! A reboot loses all instances. They are created again for claims that are prepared.

use tessera_api::names::ClaimUid;
use tessera_gpu::{ComputeInstance, GpuInstance, MigLibrary, MigLibraryError};
use tessera_runtime::error_chain::chain;

use super::{LocalNode, PrepareError};
use crate::state::journal::{ClaimRecord, ComputeInstanceRecord, LockedJournal, MigDeviceRecord};

impl LocalNode {
    /// Checks that no instance has the placement of a MIG device of a claim that is not in the
    /// journal: later, an instance without compute instances is taken for one of the claim.
    ///
    /// # Errors
    /// [`MigLibraryError::Taken`], or the library fails.
    pub(super) fn check_mig_placements(&self, record: &ClaimRecord) -> Result<(), MigLibraryError> {
        for device in &record.mig_devices {
            if instance_of(self.executor.mig(), device)?.is_some() {
                return Err(taken(device));
            }
        }
        Ok(())
    }

    /// Creates the missing instances of a claim's MIG devices. Returns the record with the present
    /// instances, as it is in the journal.
    ///
    /// # Idempotency
    /// Instances that exist are kept.
    ///
    /// # Errors
    /// [`PrepareError::Mig`] or [`PrepareError::Journal`]. Some instances may exist then, and the
    /// journal has their IDs.
    pub(super) fn ensure_mig_devices(
        &self,
        claim: &ClaimUid,
        mut record: ClaimRecord,
        journal: &mut LockedJournal<'_>,
    ) -> Result<ClaimRecord, PrepareError> {
        for position in 0..record.mig_devices.len() {
            let device = &record.mig_devices[position];
            let gpu_instance = self.ensure_gpu_instance(device)?;
            if device.gpu_instance != Some(gpu_instance.id) || !has_recorded(device, &gpu_instance)
            {
                let device = &mut record.mig_devices[position];
                device.gpu_instance = Some(gpu_instance.id);
                device.compute_instance = None;
                journal.put(claim.clone(), record.clone())?;
            }
            if record.mig_devices[position].compute_instance.is_none() {
                let device = &record.mig_devices[position];
                let compute = self.ensure_compute_instance(device, &gpu_instance)?;
                record.mig_devices[position].compute_instance = Some(compute);
                journal.put(claim.clone(), record.clone())?;
            }
        }
        Ok(record)
    }

    /// Returns the GPU instance of a device, which is created if there is none.
    fn ensure_gpu_instance(
        &self,
        device: &MigDeviceRecord,
    ) -> Result<GpuInstance, MigLibraryError> {
        let (mig, gpu) = (self.executor.mig(), device.device.gpu());
        if let Some(found) = instance_of(mig, device)? {
            if is_own(device, &found) {
                return Ok(found);
            }
            return Err(taken(device));
        }
        let id = mig.create_gpu_instance(gpu, device.device.profile(), device.device.start())?;
        let created = instance_of(mig, device)?.filter(|instance| instance.id == id);
        created.ok_or_else(|| taken(device))
    }

    /// Returns the compute instance of a device, which is created if there is none.
    fn ensure_compute_instance(
        &self,
        device: &MigDeviceRecord,
        gpu_instance: &GpuInstance,
    ) -> Result<ComputeInstanceRecord, MigLibraryError> {
        let (mig, gpu) = (self.executor.mig(), device.device.gpu());
        let compute = match gpu_instance.compute.first() {
            Some(compute) => compute.clone(),
            None => mig.create_compute_instance(gpu, gpu_instance.id)?,
        };
        self.compute_record(device, gpu_instance, &compute)
    }

    fn compute_record(
        &self,
        device: &MigDeviceRecord,
        gpu_instance: &GpuInstance,
        compute: &ComputeInstance,
    ) -> Result<ComputeInstanceRecord, MigLibraryError> {
        let (mig, gpu) = (self.executor.mig(), device.device.gpu());
        let nodes = mig.capability_nodes(gpu, gpu_instance.id, compute.id)?;
        Ok(ComputeInstanceRecord {
            uuid: compute.uuid.clone(),
            capability_major: nodes[0].major,
            capability_minors: nodes.map(|node| node.minor),
        })
    }

    /// Takes the existing instances of a claim's MIG devices into its record: the journal was lost,
    /// and the claim has a CDI spec on this node.
    pub(super) fn adopt_mig_devices(&self, record: &mut ClaimRecord) {
        for device in &mut record.mig_devices {
            let adopted = instance_of(self.executor.mig(), device).and_then(|found| {
                let Some(found) = found else { return Ok(()) };
                let compute = found.compute.first();
                let compute = compute.map(|compute| self.compute_record(device, &found, compute));
                device.compute_instance = compute.transpose()?;
                device.gpu_instance = Some(found.id);
                Ok(())
            });
            if let Err(error) = adopted {
                tracing::warn!(
                    device = %device.device, error = %chain(&error),
                    "cannot find the instances of a MIG device to rebuild the journal"
                );
            }
        }
    }
}

/// Destroys the instances of a device, if they exist and are the claim's. A GPU that is gone, or
/// not in MIG mode, has none.
///
/// # Errors
/// [`MigLibraryError`]; doing it again is safe.
pub(super) fn destroy(
    mig: &dyn MigLibrary,
    device: &MigDeviceRecord,
) -> Result<(), MigLibraryError> {
    let gpu = device.device.gpu();
    let found = match instance_of(mig, device) {
        Err(MigLibraryError::Library(tessera_gpu::LibraryError::Lost { .. })) => return Ok(()),
        found => found?,
    };
    match found {
        Some(found) if is_own(device, &found) => mig.destroy_gpu_instance(gpu, found.id),
        Some(_) => {
            tracing::warn!(device = %device.device, "left a GPU instance that no claim has created");
            Ok(())
        }
        None => Ok(()),
    }
}

fn taken(device: &MigDeviceRecord) -> MigLibraryError {
    let device = &device.device;
    let (profile, start) = (device.profile(), device.start());
    MigLibraryError::Taken { gpu: device.gpu().clone(), profile, start }
}

/// Returns the GPU instance with the profile and placement of a device.
fn instance_of(
    mig: &dyn MigLibrary,
    device: &MigDeviceRecord,
) -> Result<Option<GpuInstance>, MigLibraryError> {
    let device = &device.device;
    let mut found = mig.gpu_instances(device.gpu(), device.profile())?.into_iter();
    Ok(found.find(|instance| instance.instance.placement.start == device.start()))
}

/// Returns true if the GPU instance at the device's placement is the one of the record, or was left
/// by a process that died before it recorded it.
fn is_own(device: &MigDeviceRecord, found: &GpuInstance) -> bool {
    match device.gpu_instance {
        Some(id) => id == found.id && (found.compute.is_empty() || has_recorded(device, found)),
        None => found.compute.is_empty(),
    }
}

/// Returns true if the record has no compute instance, or has one of the GPU instance.
fn has_recorded(device: &MigDeviceRecord, found: &GpuInstance) -> bool {
    let Some(recorded) = &device.compute_instance else { return true };
    found.compute.iter().any(|compute| compute.uuid == recorded.uuid)
}
