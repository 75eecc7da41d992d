//! Open writes: the claims that are being written, and by which write.
//!
//! A claim has one open write at most. Its devices stay taken until the outcome is known, and no
//! part decides about the claim before. An outcome ends the write that it names and no other: a
//! late answer to an old write must not end a new one.

use std::collections::{BTreeMap, BTreeSet};

use tessera_allocator::model::PodUid;
use tessera_api::names::ClaimUid;

use super::clock::Moment;
use super::effect::WriteId;

/// The writes under way.
#[derive(Debug, Default)]
pub(super) struct OpenWrites {
    claims: BTreeMap<ClaimUid, OpenWrite>,
    ids: BTreeMap<WriteId, ClaimUid>,
    started: u64,
}

/// A write under way.
#[derive(Debug, Clone)]
pub(super) struct OpenWrite {
    id: WriteId,
    pub(super) purpose: WritePurpose,
    /// The pod that it is for.
    pub(super) pod: Option<PodUid>,
    /// The time of the decision; for an allocation, of the event that led to it.
    pub(super) since: Moment,
}

/// The purpose of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WritePurpose {
    /// Allocates devices that a plan has chosen.
    Allocation,
    /// Releases devices.
    Release,
    /// Moves a claim to the node of the pod that is bound with it.
    Repair,
    /// Ends the wait at the barrier of a group.
    Barrier,
    /// Changes the sizes of shares.
    Resize,
}

impl OpenWrites {
    /// Returns true if the claim is being written.
    pub(super) fn contains(&self, claim: &ClaimUid) -> bool {
        self.claims.contains_key(claim)
    }

    /// Returns true if nothing is being written.
    pub(super) fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// Returns the pods that writes are open for.
    pub(super) fn pods(&self) -> BTreeSet<PodUid> {
        self.claims.values().filter_map(|write| write.pod.clone()).collect()
    }

    /// Returns the open writes by claim.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&ClaimUid, &OpenWrite)> {
        self.claims.iter()
    }

    /// Opens a write; none if the claim has an open one.
    pub(super) fn open(
        &mut self,
        claim: &ClaimUid,
        purpose: WritePurpose,
        pod: Option<&PodUid>,
        since: Moment,
    ) -> Option<WriteId> {
        if self.contains(claim) {
            return None;
        }
        self.started += 1;
        let id = WriteId(self.started);
        let write = OpenWrite { id, purpose, pod: pod.cloned(), since };
        self.claims.insert(claim.clone(), write);
        self.ids.insert(id, claim.clone());
        Some(id)
    }

    /// Ends the write of this number; none if it is not open.
    pub(super) fn end(&mut self, id: WriteId) -> Option<(ClaimUid, OpenWrite)> {
        let claim = self.ids.remove(&id)?;
        let write = self.claims.remove(&claim)?;
        debug_assert_eq!(write.id, id, "a claim has one open write");
        Some((claim, write))
    }
}
