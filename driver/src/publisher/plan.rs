//! Plans the changes from observed to desired slices. Pure functions.
//!
//! A pool is complete for its readers if the number of slices of its highest generation is the
//! number that each of them states. So one changed slice of an otherwise unchanged pool keeps the
//! generation (it is replaced atomically). All other changes give all slices the next generation.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::resource::v1::{DeviceTaint, ResourceSlice},
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use serde_json::{Value, json};
use tessera_api::{
    names::{FENCE_ANNOTATION, NodeName, TOPOLOGY_ANNOTATION},
    slice::{is_fenced_by_rule, keep_server_fields, same_content},
};

/// One write to the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum SliceChange {
    /// Deletes the slice.
    Delete(Box<ResourceSlice>),
    /// Patches the slice.
    Patch {
        /// The present object.
        observed: Box<ResourceSlice>,
        /// The desired object.
        wanted: Box<ResourceSlice>,
    },
    /// Creates the slice.
    Create(Box<ResourceSlice>),
}

impl SliceChange {
    /// Returns true for [`SliceChange::Create`].
    #[must_use]
    pub fn creates(&self) -> bool {
        matches!(self, Self::Create(_))
    }

    /// Returns true if the change publishes devices without the managed taint that had it or were
    /// not published: those of a slice that a DeviceTaintRule fences.
    #[must_use]
    pub fn relies_on_rule(&self) -> bool {
        match self {
            Self::Delete(_) => false,
            Self::Create(slice) => is_fenced_by_rule(slice),
            Self::Patch { observed, wanted } => {
                is_fenced_by_rule(wanted) && !is_fenced_by_rule(observed)
            }
        }
    }

    /// Makes the Node with this UID the owner of a created slice, so that the slice is deleted with
    /// the Node.
    pub fn set_owner(&mut self, node: &NodeName, uid: &str) {
        if let Self::Create(slice) = self {
            slice.metadata.owner_references = Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: node.to_string(),
                uid: uid.to_owned(),
                controller: Some(true),
                block_owner_deletion: None,
            }]);
        }
    }
}

/// Returns the changes from `observed` to `desired`, in order. Obsolete slices are deleted first,
/// so that no device is in two slices. `generation` is the highest generation ever seen.
#[must_use]
pub fn plan(
    desired: Vec<ResourceSlice>,
    observed: Vec<ResourceSlice>,
    generation: i64,
) -> Vec<SliceChange> {
    let highest =
        observed.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0).max(generation);
    let count = i64::try_from(desired.len()).unwrap_or(i64::MAX);
    let (matched, obsolete) = match_up(desired, observed);

    let of_pool = |slice: &ResourceSlice| {
        slice.spec.pool.generation == highest && slice.spec.pool.resource_slice_count == count
    };
    let settled = matched.iter().all(|(_, known)| known.as_ref().is_some_and(of_pool));
    let is_same = |(slice, known): &(ResourceSlice, Option<ResourceSlice>)| {
        known.as_ref().is_some_and(|known| same_content(slice, known))
    };
    let differing = matched.iter().filter(|pair| !is_same(pair)).count();
    let keep = obsolete.is_empty() && settled && differing <= 1;
    if keep && differing == 0 {
        return Vec::new();
    }
    let generation = if keep { highest } else { highest + 1 };

    let mut changes: Vec<_> =
        obsolete.into_iter().map(|slice| SliceChange::Delete(Box::new(slice))).collect();
    let mut creations = Vec::new();
    for (mut slice, known) in matched {
        slice.spec.pool.generation = generation;
        slice.spec.pool.resource_slice_count = count;
        match known {
            None => creations.push(SliceChange::Create(Box::new(slice))),
            Some(known) if keep && same_content(&slice, &known) => {}
            Some(known) => {
                keep_server_fields(&mut slice, &known);
                changes.push(SliceChange::Patch {
                    observed: Box::new(known),
                    wanted: Box::new(slice),
                });
            }
        }
    }
    changes.extend(creations);
    changes
}

/// Pairs desired slices with observed slices of the same name, and returns the obsolete others. A
/// slice with the name and another pool is obsolete: its fields are immutable.
fn match_up(
    desired: Vec<ResourceSlice>,
    observed: Vec<ResourceSlice>,
) -> (Vec<(ResourceSlice, Option<ResourceSlice>)>, Vec<ResourceSlice>) {
    let mut observed: BTreeMap<_, _> = observed
        .into_iter()
        .map(|slice| (slice.metadata.name.clone().unwrap_or_default(), slice))
        .collect();
    let matched = desired
        .into_iter()
        .map(|slice| {
            let name = slice.metadata.name.clone().unwrap_or_default();
            let known = match observed.remove(&name) {
                Some(known) if known.spec.pool.name != slice.spec.pool.name => {
                    observed.insert(name, known);
                    None
                }
                known => known,
            };
            (slice, known)
        })
        .collect();
    (matched, observed.into_values().collect())
}

/// Returns true if `written` has all taints of `wanted`. An API server without the feature drops
/// them, and other schedulers could allocate the devices.
#[must_use]
pub fn same_fence(wanted: &ResourceSlice, written: &ResourceSlice) -> bool {
    let fence = |slice: &ResourceSlice| -> BTreeMap<String, Vec<(String, String)>> {
        let taint = |taint: &DeviceTaint| (taint.key.clone(), taint.effect.clone());
        let devices = slice.spec.devices.iter().flatten();
        devices
            .map(|device| {
                (device.name.clone(), device.taints.iter().flatten().map(taint).collect())
            })
            .collect()
    };
    fence(wanted) == fence(written)
}

/// Returns the body of a merge patch from `observed` to `wanted`. The API server refuses it if the
/// slice was changed meanwhile. Unknown fields stay, except in the list of devices.
#[must_use]
pub fn patch(observed: &ResourceSlice, wanted: &ResourceSlice) -> Value {
    let annotations = wanted.metadata.annotations.as_ref().map(|annotations| {
        [TOPOLOGY_ANNOTATION, FENCE_ANNOTATION].map(|name| annotations.get(name))
    });
    let [topology, fence] = annotations.unwrap_or_default();
    json!({
        "metadata": {
            "resourceVersion": observed.metadata.resource_version,
            "annotations": {TOPOLOGY_ANNOTATION: topology, FENCE_ANNOTATION: fence},
        },
        "spec": {"pool": wanted.spec.pool, "devices": wanted.spec.devices},
    })
}

#[cfg(test)]
mod tests;
