//! Groups of pods that get their devices together.
//!
//! A pod names its group and the size of the group in annotations, or in labels of the systems that
//! make groups, or it names a PodGroup. The devices of a group are decided once all of its pods
//! exist. Pods that have devices, or had them when they were bound, count as placed; the others are
//! decided together.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use tessera_allocator::PlanOrder;
use tessera_allocator::model::{GroupTopology, PendingPod, PodUid};
use tessera_api::names::{
    JOB_SET_LABEL, KUEUE_FAST_ADMISSION_ANNOTATION, KUEUE_GROUP_LABEL, KUEUE_GROUP_SIZE_ANNOTATION,
    LEADER_WORKER_GROUP_LABEL, Namespace, POD_GROUP_ANNOTATION,
    POD_GROUP_PREFERRED_TOPOLOGY_ANNOTATION, POD_GROUP_REQUIRED_TOPOLOGY_ANNOTATION,
    POD_GROUP_SIZE_ANNOTATION, VOLCANO_GROUP_ANNOTATION,
};

use crate::index::Index;
use crate::multimap::Multimap;
use crate::pod_groups::PodGroupApi;
use crate::pods::PodEntry;
use crate::work::{Blocked, PlanningBlocker};

/// The annotations of a pod that state its group.
pub const GROUP_ANNOTATIONS: [&str; 7] = [
    POD_GROUP_ANNOTATION,
    POD_GROUP_SIZE_ANNOTATION,
    POD_GROUP_REQUIRED_TOPOLOGY_ANNOTATION,
    POD_GROUP_PREFERRED_TOPOLOGY_ANNOTATION,
    KUEUE_GROUP_SIZE_ANNOTATION,
    KUEUE_FAST_ADMISSION_ANNOTATION,
    VOLCANO_GROUP_ANNOTATION,
];

/// The labels of a pod that state its group.
pub const GROUP_LABELS: [&str; 3] = [KUEUE_GROUP_LABEL, LEADER_WORKER_GROUP_LABEL, JOB_SET_LABEL];

/// The most pods of a group: a plan places all of them at once.
pub const MAX_GROUP_SIZE: u32 = 512;

/// The identity of a group of pods.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupKey {
    namespace: Namespace,
    /// The object or the name that the pods have in common, with its kind.
    name: Box<str>,
}

/// The group that a pod states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupMember {
    /// The group; a pod without one is alone in it.
    pub(crate) key: GroupKey,
    size: StatedSize,
    /// The topology that the pod states, without nodes.
    topology: Option<GroupTopology>,
}

/// The number of pods of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StatedSize {
    /// An annotation states it.
    Annotation(Result<u32, GroupProblem>),
    /// The PodGroup with the group's key states it.
    PodGroup(PodGroupApi),
}

/// The cause for which the pods of a group cannot be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupProblem {
    /// The pod names a group and not its size.
    SizeMissing,
    /// The size is not a number from 1 to [`MAX_GROUP_SIZE`].
    SizeInvalid,
    /// The pod states a size, and neither a group nor an owner.
    NameMissing,
    /// The PodGroup that the pod names does not exist.
    PodGroupMissing,
    /// The PodGroup that the pod names starts more than [`MAX_GROUP_SIZE`] pods together.
    PodGroupTooLarge,
    /// Pods are missing.
    Incomplete {
        /// The size of the group.
        size: u32,
        /// The number of its pods that have devices or wait for them.
        present: u32,
    },
}

/// The work on a group.
#[derive(Debug, Default)]
pub struct GroupWork {
    /// The pods to plan, as one.
    pub pending: Option<PendingPod>,
    /// Pods that cannot be planned.
    pub blocked: Vec<Blocked>,
}

/// The progress of a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Progress {
    /// The largest size that its pods state.
    size: u32,
    /// The number of pods that have all of their devices, or had them when they were bound.
    placed: u32,
}

impl GroupKey {
    /// Returns the key of the group that the pods of a namespace name, by the kind of its name.
    pub(crate) fn new(namespace: Namespace, kind: &str, name: &str) -> Self {
        Self { namespace, name: format!("{kind}/{name}").into_boxed_str() }
    }
}

impl GroupMember {
    /// Returns the group of a pod; none if it is in none.
    pub(crate) fn of(pod: &Pod) -> Option<Self> {
        let metadata = &pod.metadata;
        let annotation = |name: &str| Some(metadata.annotations.as_ref()?.get(name)?.as_str());
        let label = |name: &str| Some(metadata.labels.as_ref()?.get(name)?.as_str());
        let (name, size) =
            (annotation(POD_GROUP_ANNOTATION), annotation(POD_GROUP_SIZE_ANNOTATION));
        // With fast admission the first pod may create the others.
        let of_kueue = label(KUEUE_GROUP_LABEL)
            .filter(|_| annotation(KUEUE_FAST_ADMISSION_ANNOTATION) != Some("true"));
        let size_in_kueue = of_kueue.and_then(|_| annotation(KUEUE_GROUP_SIZE_ANNOTATION));
        let pod_group = pod_group(pod);
        name.or(size).or(size_in_kueue).or(pod_group.map(|(_, name)| name))?;
        let common = [
            ("PodGroup", name),
            pod_group.map_or(("", None), |(api, name)| (api.name(), Some(name))),
            ("Kueue", of_kueue),
            ("LeaderWorkerSet", label(LEADER_WORKER_GROUP_LABEL)),
            ("JobSet", label(JOB_SET_LABEL)),
            ("owner", owner(pod)),
        ];
        let common = common.iter().find_map(|(kind, name)| Some((*kind, (*name)?)));
        let size = match (size.or(size_in_kueue), name, pod_group) {
            (None, None, Some((api, _))) => StatedSize::PodGroup(api),
            (None, _, _) => StatedSize::Annotation(Err(GroupProblem::SizeMissing)),
            (Some(size), _, _) => match annotated_size(size) {
                Ok(2..) if common.is_none() => {
                    StatedSize::Annotation(Err(GroupProblem::NameMissing))
                }
                size => StatedSize::Annotation(size),
            },
        };
        let alone = ("pod", metadata.uid.as_deref()?);
        let (kind, name) = common.unwrap_or(alone);
        let namespace = Namespace::new(metadata.namespace.as_deref()?).ok()?;
        let of = |name: &str| annotation(name).map(str::to_owned);
        let topology = GroupTopology {
            required: of(POD_GROUP_REQUIRED_TOPOLOGY_ANNOTATION),
            preferred: of(POD_GROUP_PREFERRED_TOPOLOGY_ANNOTATION),
            placed: BTreeSet::new(),
        };
        let topology = (topology != GroupTopology::default()).then_some(topology);
        Some(Self { key: GroupKey::new(namespace, kind, name), size, topology })
    }

    /// Returns the API of the PodGroup that states the size; none if an annotation states it.
    pub(crate) fn pod_group_api(&self) -> Option<PodGroupApi> {
        match self.size {
            StatedSize::PodGroup(api) => Some(api),
            StatedSize::Annotation(_) => None,
        }
    }
}

/// Returns the PodGroup that the pod names.
fn pod_group(pod: &Pod) -> Option<(PodGroupApi, &str)> {
    let group = pod.spec.as_ref().and_then(|spec| spec.scheduling_group.as_ref());
    let of_kubernetes = group.and_then(|group| group.pod_group_name.as_deref());
    let of_volcano =
        || pod.metadata.annotations.as_ref()?.get(VOLCANO_GROUP_ANNOTATION).map(String::as_str);
    let of_kubernetes = of_kubernetes.map(|name| (PodGroupApi::Kubernetes, name));
    of_kubernetes.or_else(|| Some((PodGroupApi::Volcano, of_volcano()?)))
}

/// Reads the size of a group.
fn annotated_size(size: &str) -> Result<u32, GroupProblem> {
    let size = u32::from_str(size).ok().filter(|size| (1..=MAX_GROUP_SIZE).contains(size));
    size.ok_or(GroupProblem::SizeInvalid)
}

/// Returns the UID of the controlling owner.
fn owner(pod: &Pod) -> Option<&str> {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.as_str())
}

/// The pods of each group.
pub(crate) type Groups = Multimap<GroupKey, PodUid>;

impl Index {
    /// Adds the pod to its group.
    pub(crate) fn join_group(&mut self, pod: &PodEntry) {
        if let Some(member) = &pod.group {
            self.groups.insert(member.key.clone(), pod.uid.clone());
        }
    }

    /// Removes the pod from its group, whose planning may have changed.
    pub(crate) fn leave_group(&mut self, pod: &PodEntry) {
        if let Some(member) = &pod.group {
            self.groups.remove(&member.key, &pod.uid);
            let other = self.groups.get(&member.key).next().cloned();
            self.changed_pods.extend(other);
        }
    }

    /// Returns the group that a pod gets its devices with; none if it gets them alone.
    pub fn group_of(&self, pod: &PodUid) -> Option<&GroupKey> {
        let member = self.pods.get(pod)?.group.as_ref()?;
        (self.stated_size(member) != Ok(None)).then_some(&member.key)
    }

    /// Returns the number of pods of the group that a pod states; none if the pod is planned alone.
    fn stated_size(&self, member: &GroupMember) -> Result<Option<u32>, GroupProblem> {
        match member.size {
            StatedSize::Annotation(size) => size.map(Some),
            StatedSize::PodGroup(api) => self.pod_groups.size(api, &member.key),
        }
    }

    /// Returns the size of the group that the pod states; 0 without a valid one.
    fn size_stated_by(&self, pod: &PodEntry) -> u32 {
        let stated = pod.group.as_ref().map(|member| self.stated_size(member));
        stated.and_then(Result::ok).flatten().unwrap_or(0)
    }

    /// Adds the other pods of the groups of these pods.
    pub fn complete_groups(&self, pods: &mut BTreeSet<PodUid>) {
        let groups: BTreeSet<&GroupKey> =
            pods.iter().filter_map(|pod| self.group_of(pod)).collect();
        for group in groups {
            pods.extend(self.groups.get(group).cloned());
        }
    }

    /// Returns what is to be planned of a group: as many of its waiting pods as are missing to its
    /// size. Once it has its size, every further pod is planned alone.
    pub fn plan_group(&self, group: &GroupKey) -> GroupWork {
        let mut work = GroupWork::default();
        // Its devices are being released.
        if self.has_failed_barrier(group) {
            return work;
        }
        let mut waiting = Vec::new();
        let Progress { size, placed } = self.progress(group);
        let members = self.groups.get(group).filter_map(|uid| self.pods.get(uid));
        for (pod, member) in members.filter_map(|pod| Some((pod, pod.group.as_ref()?))) {
            let Ok(Some(pending)) = self.to_plan_alone(&pod.uid).map_err(|b| work.blocked.push(b))
            else {
                continue;
            };
            match self.stated_size(member) {
                Ok(_) => waiting.push(pending),
                Err(problem) => work.blocked.extend(blocked_by(&pending, problem)),
            }
        }
        let missing = size.saturating_sub(placed) as usize;
        if waiting.len() < missing {
            let present = placed + u32::try_from(waiting.len()).unwrap_or(u32::MAX);
            let problem = GroupProblem::Incomplete { size, present };
            work.blocked.extend(waiting.iter().filter_map(|pod| blocked_by(pod, problem)));
            return work;
        }
        waiting.sort_by_cached_key(PlanOrder::of);
        let mut waiting = waiting.into_iter().take(missing.max(1));
        work.pending = waiting.next();
        if let Some(first) = &mut work.pending {
            first.together_with = waiting.collect();
            first.topology = self.topology_of(group, &first.uid).map(Arc::new);
        }
        work
    }

    /// Returns the topology of a group: that of its first waiting pod, or that of its PodGroup.
    fn topology_of(&self, group: &GroupKey, first: &PodUid) -> Option<GroupTopology> {
        let of_pod_group = || {
            let required = self.pod_groups.required_topology(group)?.clone();
            Some(GroupTopology { required: Some(required), ..GroupTopology::default() })
        };
        let member = self.pods.get(first)?.group.as_ref()?;
        let topology = member.topology.clone().or_else(of_pod_group)?;
        let placed = self.members_of(group).filter_map(|pod| pod.counted_on.clone()).collect();
        Some(GroupTopology { placed, ..topology })
    }

    fn progress(&self, group: &GroupKey) -> Progress {
        let mut progress = Progress::default();
        for pod in self.members_of(group) {
            progress.size = progress.size.max(self.size_stated_by(pod));
            progress.placed += u32::from(self.is_placed(pod));
        }
        progress
    }

    /// Returns the largest size that a pod of the group states; 0 if none states a valid one.
    pub(crate) fn group_size(&self, group: &GroupKey) -> u32 {
        self.members_of(group).map(|pod| self.size_stated_by(pod)).max().unwrap_or(0)
    }

    /// Returns the pods of a group. Others take the places of those that have failed or are being
    /// deleted.
    pub(crate) fn members_of(&self, group: &GroupKey) -> impl Iterator<Item = &PodEntry> {
        let pods = self.groups.get(group).filter_map(|uid| self.pods.get(uid));
        pods.filter(|pod| !pod.deleting && !pod.failed)
    }

    /// Returns true if the pod has all of its devices, or had them when it was bound.
    fn is_placed(&self, pod: &PodEntry) -> bool {
        let is_allocated = || {
            let entries = self.claims_of(pod);
            entries.is_some_and(|entries| !entries.iter().any(|entry| self.lacks_allocation(entry)))
        };
        pod.node.is_some() || pod.finished || is_allocated()
    }
}

/// Returns that a pod cannot be planned, at its first claim to allocate.
fn blocked_by(pod: &PendingPod, problem: GroupProblem) -> Option<Blocked> {
    let claim = pod.pending_claims().next()?.uid.clone();
    Some(Blocked { pod: pod.uid.clone(), claim, blocker: PlanningBlocker::Group(problem) })
}
