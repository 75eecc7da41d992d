//! PodGroup objects of Kubernetes and of Volcano, which state the size of a group.
//!
//! A pod names its PodGroup. While the API server does not serve the kind, the name means nothing,
//! and the pod is planned alone.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::scheduling::v1beta1::PodGroup;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tessera_allocator::model::PodUid;
use tessera_api::names::Namespace;
use tessera_api::volcano::VolcanoPodGroup;

use crate::groups::{GroupKey, GroupProblem, MAX_GROUP_SIZE};
use crate::index::Index;

/// The API of a PodGroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PodGroupApi {
    /// `scheduling.k8s.io`: pods name it in `spec.schedulingGroup`.
    Kubernetes,
    /// `scheduling.volcano.sh`: pods name it in an annotation.
    Volcano,
}

impl PodGroupApi {
    /// Returns the API group.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kubernetes => "scheduling.k8s.io",
            Self::Volcano => "scheduling.volcano.sh",
        }
    }

    fn key(self, metadata: &ObjectMeta) -> Option<GroupKey> {
        let namespace = Namespace::new(metadata.namespace.as_deref()?).ok()?;
        Some(GroupKey::new(namespace, self.name(), metadata.name.as_deref()?))
    }
}

/// The fields of a PodGroup that planning reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct PodGroupEntry {
    /// The number of pods that start together; at most 1 = each pod starts alone.
    minimum: u32,
    /// The label of nodes of which all pods get nodes with one value.
    required_topology: Option<String>,
}

/// The PodGroups of the cluster.
#[derive(Debug, Default)]
pub(crate) struct PodGroups {
    /// The kinds that the API server serves.
    served: BTreeSet<PodGroupApi>,
    entries: BTreeMap<GroupKey, PodGroupEntry>,
}

impl PodGroups {
    /// Returns the number of pods that the PodGroup starts together; none if it starts each alone.
    ///
    /// # Errors
    /// It does not exist, or the number is larger than a plan allows.
    pub(crate) fn size(
        &self,
        api: PodGroupApi,
        key: &GroupKey,
    ) -> Result<Option<u32>, GroupProblem> {
        if !self.served.contains(&api) {
            return Ok(None);
        }
        match self.entries.get(key).ok_or(GroupProblem::PodGroupMissing)?.minimum {
            0 | 1 => Ok(None),
            size if size > MAX_GROUP_SIZE => Err(GroupProblem::PodGroupTooLarge),
            size => Ok(Some(size)),
        }
    }

    /// Returns the label of nodes of which all pods of the PodGroup get nodes with one value.
    pub(crate) fn required_topology(&self, key: &GroupKey) -> Option<&String> {
        self.entries.get(key)?.required_topology.as_ref()
    }
}

impl Index {
    /// Takes over whether the API server serves a kind of PodGroup. Initially it serves none.
    pub fn set_pod_groups_served(&mut self, api: PodGroupApi, is_served: bool) {
        let served = &mut self.pod_groups.served;
        let is_news = if is_served { served.insert(api) } else { served.remove(&api) };
        if is_news {
            let is_of_api = |uid: &&PodUid| {
                let group = self.pods.get(*uid).and_then(|pod| pod.group.as_ref());
                group.is_some_and(|member| member.pod_group_api() == Some(api))
            };
            let pods: Vec<PodUid> = self.unbound.iter().filter(is_of_api).cloned().collect();
            self.changed_pods.extend(pods);
        }
    }

    /// Takes over a PodGroup of Kubernetes. Returns true if anything changed that planning reads.
    pub fn apply_pod_group(&mut self, object: &PodGroup) -> bool {
        let gang = object.spec.scheduling_policy.gang.as_ref();
        let constraints = object.spec.scheduling_constraints.as_ref();
        let topologies = constraints.and_then(|constraints| constraints.topology.as_ref());
        let entry = PodGroupEntry {
            minimum: gang.map_or(0, |gang| count(gang.min_count)),
            required_topology: topologies.and_then(|all| Some(all.first()?.key.clone())),
        };
        self.set_pod_group(PodGroupApi::Kubernetes.key(&object.metadata), Some(entry))
    }

    /// Removes a deleted PodGroup of Kubernetes. Returns true if it was known.
    pub fn remove_pod_group(&mut self, object: &PodGroup) -> bool {
        self.set_pod_group(PodGroupApi::Kubernetes.key(&object.metadata), None)
    }

    /// Takes over a PodGroup of Volcano. Returns true if anything changed that planning reads.
    pub fn apply_volcano_pod_group(&mut self, object: &VolcanoPodGroup) -> bool {
        let minimum = object.spec.min_member.map_or(0, count);
        let entry = PodGroupEntry { minimum, required_topology: None };
        self.set_pod_group(PodGroupApi::Volcano.key(&object.metadata), Some(entry))
    }

    /// Removes a deleted PodGroup of Volcano. Returns true if it was known.
    pub fn remove_volcano_pod_group(&mut self, object: &VolcanoPodGroup) -> bool {
        self.set_pod_group(PodGroupApi::Volcano.key(&object.metadata), None)
    }

    fn set_pod_group(&mut self, key: Option<GroupKey>, entry: Option<PodGroupEntry>) -> bool {
        let Some(key) = key else { return false };
        if self.pod_groups.entries.get(&key) == entry.as_ref() {
            return false;
        }
        self.changed_pods.extend(self.groups.get(&key).cloned());
        match entry {
            Some(entry) => drop(self.pod_groups.entries.insert(key, entry)),
            None => drop(self.pod_groups.entries.remove(&key)),
        }
        true
    }
}

/// Returns a number of pods; 0 for a negative one.
fn count(pods: i32) -> u32 {
    u32::try_from(pods).unwrap_or(0)
}
