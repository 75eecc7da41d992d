//! The content of the journal.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tessera_api::config::ComputePolicy;
use tessera_api::gpu::MigInstance;
use tessera_api::names::{
    ClaimDeviceName, ClaimName, ClaimUid, DeviceName, GpuUuid, MigDeviceName, MigUuid, Namespace,
    PoolName, RequestName, ResultId, ShareId,
};
use tessera_intercept_limiter::compute::Entitlement;

use crate::intercept::Injection;

/// The claims that are prepared, or being prepared, on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Journal {
    /// Records by UID of the claim.
    pub claims: BTreeMap<ClaimUid, ClaimRecord>,
}

/// The record of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClaimRecord {
    /// The claim's namespace.
    pub namespace: Namespace,
    /// The claim's name.
    pub name: ClaimName,
    /// The progress of Prepare.
    pub state: RecordState,
    /// Hash of the interceptor library of its containers. It does not change while the claim is
    /// prepared, so that all processes of one ledger run the same code.
    pub library: String,
    /// Injection of the library into its containers.
    #[serde(default, skip_serializing_if = "Injection::is_default")]
    pub intercept: Injection,
    /// Memory charged to its shares for each CUDA context, in bytes. Absent means 0, which charges
    /// nothing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub context_bytes: u64,
    /// Its shares, in the order of the allocation's results.
    pub shares: Vec<ShareRecord>,
    /// Its MIG devices, in the order of the allocation's results. Since version 5.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_devices: Vec<MigDeviceRecord>,
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by serde")]
fn is_false(value: &bool) -> bool {
    !*value
}

/// Progress of the Prepare of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecordState {
    /// Steps may have been taken. Under the lock, this record was left by a dead process, or its
    /// claim waits for its MPS control daemon.
    Started,
    /// All steps were taken.
    Completed,
}

/// One result of a claim's allocation: a share of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShareRecord {
    /// The index in the allocation's results.
    pub index: usize,
    /// The request for which it was allocated, with the subrequest if there is one.
    pub request: RequestName,
    /// The pool.
    pub pool: PoolName,
    /// The device in the pool.
    pub device: DeviceName,
    /// The share of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<ShareId>,
    /// The GPU.
    pub gpu: GpuUuid,
    /// Memory that its containers are held to, in bytes.
    pub memory_bytes: u64,
    /// Compute in percent of the GPU; 0 is best effort.
    pub cores_percent: u8,
    /// Reservation on the GPU. Absent means as much as its containers are held to. Since
    /// version 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Reserved>,
    /// The enforcement of the percentage.
    pub compute: ComputeCap,
    /// The ceiling in percent of the GPU, above `cores_percent`. Absent means none: that of the
    /// enforcement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_percent: Option<u8>,
    /// The priority for spare compute.
    #[serde(default, skip_serializing_if = "ComputePriority::is_normal")]
    pub priority: ComputePriority,
    /// True if its device memory may be moved to the host. Absent means false. Since version 2.
    #[serde(default, skip_serializing_if = "is_false")]
    pub oversubscribe: bool,
    /// True if it shares the GPU by MPS. Absent means false. Since version 3.
    #[serde(default, skip_serializing_if = "is_false")]
    pub mps: bool,
}

/// One result of a claim's allocation: a MIG device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MigDeviceRecord {
    /// The index in the allocation's results.
    pub index: usize,
    /// The request for which it was allocated, with the subrequest if there is one.
    pub request: RequestName,
    /// The pool.
    pub pool: PoolName,
    /// The device in the pool: GPU, profile and placement.
    pub device: MigDeviceName,
    /// The ID of its GPU instance. Absent until that was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// Its compute instance. Absent until that was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_instance: Option<ComputeInstanceRecord>,
}

/// The compute instance of a MIG device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ComputeInstanceRecord {
    /// The UUID of the MIG device.
    pub uuid: MigUuid,
    /// Major number of the capability devices.
    pub capability_major: u32,
    /// Minor numbers of the capability devices: of the GPU instance and of the compute instance.
    pub capability_minors: [u32; 2],
}

/// Reservation of a share that is held to less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Reserved {
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Percent of compute.
    pub cores_percent: u8,
}

/// Enforcement of a compute share, in the journal's own format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComputeCap {
    /// Not enforced.
    None,
    /// Always enforced.
    Fixed,
    /// Enforced while other shares use the GPU.
    Balance,
}

impl From<ComputePolicy> for ComputeCap {
    fn from(policy: ComputePolicy) -> Self {
        match policy {
            ComputePolicy::Fixed => Self::Fixed,
            ComputePolicy::Balance => Self::Balance,
            ComputePolicy::None => Self::None,
        }
    }
}

impl From<ComputeCap> for tessera_intercept_abi::ComputePolicy {
    fn from(cap: ComputeCap) -> Self {
        match cap {
            ComputeCap::None => Self::None,
            ComputeCap::Fixed => Self::Fixed,
            ComputeCap::Balance => Self::Balance,
        }
    }
}

/// Priority for spare compute of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComputePriority {
    /// Served first.
    High,
    /// Served next.
    #[default]
    Normal,
    /// Served last.
    Low,
}

impl ComputePriority {
    // The default is not written, so that a driver without this field can read the journal as long
    // as no claim sets it.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "required by serde")]
    fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}

/// Sum of what the shares of a GPU reserve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuUsage {
    /// Memory in bytes.
    pub memory_bytes: u128,
    /// Percent of compute.
    pub cores_percent: u32,
    /// True if a share may not be oversubscribed.
    pub is_fixed: bool,
    /// True if a share uses MPS.
    pub by_mps: bool,
    /// True if a share does not use MPS.
    pub by_intercept: bool,
}

impl GpuUsage {
    /// Returns the sum of those of `shares` that are on `gpu`.
    pub fn on<'s>(gpu: &GpuUuid, shares: impl IntoIterator<Item = &'s ShareRecord>) -> Self {
        let shares = shares.into_iter().filter(|share| share.gpu == *gpu);
        shares.fold(Self::default(), |sum, share| Self {
            memory_bytes: sum.memory_bytes + u128::from(share.reservation().memory_bytes),
            cores_percent: sum.cores_percent + u32::from(share.reservation().cores_percent),
            is_fixed: sum.is_fixed || !share.oversubscribe,
            by_mps: sum.by_mps || share.mps,
            by_intercept: sum.by_intercept || !share.mps,
        })
    }
}

impl ClaimRecord {
    /// Returns the GPUs of its shares and MIG devices.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        let mig = self.mig_devices.iter().map(|device| device.device.gpu());
        self.shares.iter().map(|share| &share.gpu).chain(mig)
    }

    /// Returns the GPU that the claim shares by MPS, or `None`. Such a claim has one share.
    #[must_use]
    pub fn mps_gpu(&self) -> Option<&GpuUuid> {
        self.shares.iter().find(|share| share.mps).map(|share| &share.gpu)
    }
}

impl MigDeviceRecord {
    /// Returns the name of its CDI device.
    #[must_use]
    pub fn id(&self, claim: &ClaimUid) -> ClaimDeviceName {
        ClaimDeviceName::new(claim.clone(), ResultId::Index(self.index))
    }
}

impl ShareRecord {
    /// Returns the name of the share: of its CDI device, and of its directory in the container.
    #[must_use]
    pub fn id(&self, claim: &ClaimUid) -> ClaimDeviceName {
        let result = match &self.share_id {
            Some(share) => ResultId::Share(share.clone()),
            None => ResultId::Index(self.index),
        };
        ClaimDeviceName::new(claim.clone(), result)
    }

    /// Returns the entitlement of its containers to GPU time.
    #[must_use]
    pub fn entitlement(&self) -> Entitlement {
        Entitlement::of_grant(self.compute.into(), self.cores_percent.into())
    }

    /// Takes the amounts that its containers are held to, and that it reserves, from another share.
    pub fn take_size(&mut self, other: &Self) {
        self.memory_bytes = other.memory_bytes;
        self.cores_percent = other.cores_percent;
        self.reserved = other.reserved;
    }

    /// Returns what the share reserves on its GPU.
    #[must_use]
    pub fn reservation(&self) -> Reserved {
        let Self { memory_bytes, cores_percent, .. } = *self;
        self.reserved.unwrap_or(Reserved { memory_bytes, cores_percent })
    }
}

impl Journal {
    /// Returns the GPUs that have shares or MIG devices.
    #[must_use]
    pub fn gpus_in_use(&self) -> BTreeSet<GpuUuid> {
        self.devices_in_use().into_values().collect()
    }

    /// Returns the GPUs of the devices that claims have.
    #[must_use]
    pub fn devices_in_use(&self) -> BTreeMap<DeviceName, GpuUuid> {
        let mig = self.mig_devices().map(|(_, record)| &record.device);
        let mig = mig.map(|device| (device.device_name(), device.gpu().clone()));
        self.shares().map(|share| (share.device.clone(), share.gpu.clone())).chain(mig).collect()
    }

    /// Returns true if a claim has the GPU instance.
    #[must_use]
    pub fn has_mig_instance(&self, gpu: &GpuUuid, instance: &MigInstance) -> bool {
        self.mig_devices().any(|(_, record)| {
            let device = &record.device;
            let of_record = (device.gpu(), device.profile(), device.start());
            of_record == (gpu, instance.profile, instance.placement.start)
        })
    }

    /// Returns the MIG devices with their claims.
    pub fn mig_devices(&self) -> impl Iterator<Item = (&ClaimUid, &MigDeviceRecord)> {
        let claims = self.claims.iter();
        claims.flat_map(|(uid, record)| record.mig_devices.iter().map(move |device| (uid, device)))
    }

    /// Returns the GPUs that have a share that may not be oversubscribed.
    #[must_use]
    pub fn gpus_with_fixed_shares(&self) -> BTreeSet<GpuUuid> {
        self.shares().filter(|share| !share.oversubscribe).map(|share| share.gpu.clone()).collect()
    }

    /// Returns the GPUs that claims share by MPS, without the claim `except`.
    #[must_use]
    pub fn mps_gpus(&self, except: Option<&ClaimUid>) -> BTreeSet<GpuUuid> {
        let others = self.claims.iter().filter(|(uid, _)| Some(*uid) != except);
        others.filter_map(|(_, record)| record.mps_gpu()).cloned().collect()
    }

    /// Returns the oldest version of the format that can represent the content.
    pub(super) fn version(&self) -> u32 {
        let has = |feature: fn(&ShareRecord) -> bool| self.shares().any(feature);
        if self.mig_devices().next().is_some() {
            5
        } else if has(|share| share.reserved.is_some()) {
            4
        } else if has(|share| share.mps) {
            3
        } else if has(|share| share.oversubscribe) {
            2
        } else {
            1
        }
    }

    /// Returns the memory that all shares of each GPU reserve, in bytes.
    #[must_use]
    pub fn memory_by_gpu(&self) -> BTreeMap<GpuUuid, u64> {
        let mut memory: BTreeMap<GpuUuid, u64> = BTreeMap::new();
        for share in self.shares() {
            let of_gpu = memory.entry(share.gpu.clone()).or_default();
            *of_gpu = of_gpu.saturating_add(share.reservation().memory_bytes);
        }
        memory
    }

    /// Returns the sum of the shares of `gpu`, without those of `claim`.
    #[must_use]
    pub fn used_by_others(&self, claim: &ClaimUid, gpu: &GpuUuid) -> GpuUsage {
        let others = self.claims.iter().filter(|(uid, _)| *uid != claim);
        GpuUsage::on(gpu, others.flat_map(|(_, record)| &record.shares))
    }

    /// Returns true if the containers of any claim have proxies, which load the real libraries.
    #[must_use]
    pub fn has_proxies(&self) -> bool {
        self.claims.values().any(|record| !record.intercept.replaced_libraries.is_empty())
    }

    fn shares(&self) -> impl Iterator<Item = &ShareRecord> {
        self.claims.values().flat_map(|record| &record.shares)
    }
}
