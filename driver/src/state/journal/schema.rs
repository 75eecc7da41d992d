//! The journal's content.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tessera_api::names::{
    ClaimDeviceName, ClaimName, ClaimUid, DeviceName, GpuUuid, Namespace, PoolName, RequestName,
    ResultId, ShareId,
};

use crate::intercept::Stand;

/// What is prepared, or being prepared, on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Journal {
    /// By claim.
    pub claims: BTreeMap<ClaimUid, ClaimRecord>,
}

/// One claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClaimRecord {
    /// The claim's namespace.
    pub namespace: Namespace,
    /// The claim's name.
    pub name: ClaimName,
    /// How far it is.
    pub state: State,
    /// Hash of the interceptor library that its containers get. It stays the same for the claim's
    /// life, so that all processes on one ledger run the same code.
    pub library: String,
    /// Where that stands in its containers.
    #[serde(default, skip_serializing_if = "Stand::is_default")]
    pub intercept: Stand,
    /// What a CUDA context is charged to its shares, in bytes; 0 = nothing, as in all journals
    /// before it was charged.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub context_bytes: u64,
    /// Its shares of GPUs, in the order of the allocation's results.
    pub shares: Vec<ShareRecord>,
}

fn is_nothing(bytes: &u64) -> bool {
    *bytes == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_false(is_so: &bool) -> bool {
    !*is_so
}

/// How far a claim is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum State {
    /// Steps may have been taken. Whoever finds this under the lock finds what a dead process left,
    /// or a claim whose attempt waits for its MPS control daemon.
    Started,
    /// All steps were taken.
    Completed,
}

/// One result of a claim's allocation: a share of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ShareRecord {
    /// Position in the allocation's results.
    pub index: usize,
    /// The request that it answers (with the chosen alternative, if there was a choice).
    pub request: RequestName,
    /// The pool.
    pub pool: PoolName,
    /// The device in it.
    pub device: DeviceName,
    /// Which share of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_id: Option<ShareId>,
    /// The GPU.
    pub gpu: GpuUuid,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Percent of the GPU's compute; 0 = best effort.
    pub cores_percent: u8,
    /// How the percent is held.
    pub compute: ComputeCap,
    /// Who yields first of those who use what others leave.
    #[serde(default, skip_serializing_if = "ComputePriority::is_normal")]
    pub priority: ComputePriority,
    /// Whether its plain memory may spill to the host; of version 2. Left out where it may not.
    #[serde(default, skip_serializing_if = "is_false")]
    pub oversubscribe: bool,
    /// Whether it shares the GPU by MPS; of version 3. Left out where it does not.
    #[serde(default, skip_serializing_if = "is_false")]
    pub mps: bool,
}

/// How a compute share is held; the journal's own words for what a grant says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComputeCap {
    /// Not at all.
    None,
    /// Always.
    Fixed,
    /// While others need the GPU.
    Balance,
}

/// Who gets first what others leave of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComputePriority {
    /// Before the others.
    High,
    /// As nearly all.
    #[default]
    Normal,
    /// What is left then.
    Low,
}

impl ComputePriority {
    // Left out of the journal, so that a driver that does not know the field reads it as long as
    // nobody sets it.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
    fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}

/// What shares have of a GPU together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Memory in bytes.
    pub memory_bytes: u128,
    /// Percent of compute.
    pub cores_percent: u32,
    /// Some of them may not spill to the host.
    pub is_fixed: bool,
    /// Some of them share the GPU by MPS.
    pub by_mps: bool,
    /// Some of them do not.
    pub by_intercept: bool,
}

impl Taken {
    /// What those of `shares` have that are shares of `gpu`.
    pub fn on<'s>(gpu: &GpuUuid, shares: impl IntoIterator<Item = &'s ShareRecord>) -> Self {
        let shares = shares.into_iter().filter(|share| share.gpu == *gpu);
        shares.fold(Self::default(), |sum, share| Self {
            memory_bytes: sum.memory_bytes + u128::from(share.memory_bytes),
            cores_percent: sum.cores_percent + u32::from(share.cores_percent),
            is_fixed: sum.is_fixed || !share.oversubscribe,
            by_mps: sum.by_mps || share.mps,
            by_intercept: sum.by_intercept || !share.mps,
        })
    }
}

impl ClaimRecord {
    /// The GPU that it shares by MPS: a claim has no more than one, and nothing beside it.
    #[must_use]
    pub fn gpu_by_mps(&self) -> Option<&GpuUuid> {
        self.shares.iter().find(|share| share.mps).map(|share| &share.gpu)
    }
}

impl ShareRecord {
    /// The share's name: of its CDI device and of its directory in the container.
    #[must_use]
    pub fn id(&self, claim: &ClaimUid) -> ClaimDeviceName {
        let result = match &self.share_id {
            Some(share) => ResultId::Share(share.clone()),
            None => ResultId::Index(self.index),
        };
        ClaimDeviceName::new(claim.clone(), result)
    }
}

impl Journal {
    /// GPUs that any claim has a share of.
    #[must_use]
    pub fn gpus_in_use(&self) -> BTreeSet<GpuUuid> {
        self.shares().map(|share| share.gpu.clone()).collect()
    }

    /// GPUs of which somebody has a share that may not spill to the host.
    #[must_use]
    pub fn gpus_with_fixed_shares(&self) -> BTreeSet<GpuUuid> {
        self.shares().filter(|share| !share.oversubscribe).map(|share| share.gpu.clone()).collect()
    }

    /// GPUs that claims share by MPS, with the exception of one claim.
    #[must_use]
    pub fn gpus_by_mps(&self, except: Option<&ClaimUid>) -> BTreeSet<GpuUuid> {
        let others = self.claims.iter().filter(|(uid, _)| Some(*uid) != except);
        others.filter_map(|(_, record)| record.gpu_by_mps()).cloned().collect()
    }

    /// The oldest version of the file that can say it.
    pub(super) fn version(&self) -> u32 {
        let has = |feature: fn(&ShareRecord) -> bool| self.shares().any(feature);
        match (has(|share| share.mps), has(|share| share.oversubscribe)) {
            (true, _) => 3,
            (false, true) => 2,
            (false, false) => 1,
        }
    }

    /// Memory in bytes that claims have on each GPU.
    #[must_use]
    pub fn memory_by_gpu(&self) -> BTreeMap<GpuUuid, u64> {
        let mut memory: BTreeMap<GpuUuid, u64> = BTreeMap::new();
        for share in self.shares() {
            let of_gpu = memory.entry(share.gpu.clone()).or_default();
            *of_gpu = of_gpu.saturating_add(share.memory_bytes);
        }
        memory
    }

    /// What the claims *other than* `claim` have on `gpu`.
    #[must_use]
    pub fn taken_by_others(&self, claim: &ClaimUid, gpu: &GpuUuid) -> Taken {
        let others = self.claims.iter().filter(|(uid, _)| *uid != claim);
        Taken::on(gpu, others.flat_map(|(_, record)| &record.shares))
    }

    /// Whether the containers of any claim have proxies, which need the real driver behind them.
    #[must_use]
    pub fn has_proxies(&self) -> bool {
        self.claims.values().any(|record| !record.intercept.in_place_of.is_empty())
    }

    fn shares(&self) -> impl Iterator<Item = &ShareRecord> {
        self.claims.values().flat_map(|record| &record.shares)
    }
}
