//! Placeholder pods: pods without claims by which a cluster autoscaler adds nodes for pods that fit
//! on no node (ADR 145).
//!
//! With the fence in the slices, an autoscaler finds no node for a pod with claims, however many it
//! adds. A placeholder fits on a new node of its group only, so the autoscaler adds one. The
//! placeholder stays there until the node has published its GPUs, so that it is not removed as
//! unneeded meanwhile.
//!
//! ```text
//! pods that fit on no node --node_demand--> nodes to add for each group
//!                                            | less those that publish no GPUs yet
//!                                            v
//!     deleted <--fewer-- placeholders that wait --more--> created
//!                            | bound to a new node
//!                            v
//!                        node has published its GPUs, or the time is up: deleted
//! ```
//!
//! Nothing is stored: the demand, nodes and pods are all that counts. The names of placeholders are
//! numbered, so that a creation whose outcome is not known is not repeated under another name.

mod pod;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use tessera_allocator::model::{PendingPod, PodUid};
use tessera_allocator::{NodeDemand, node_demand};
use tessera_api::events;
use tessera_api::names::{HOST_NAME_LABEL, NODE_GROUP_LABEL, NodeGroupName, NodeName, PodName};

use super::allocate::Round;
use super::clock::Moment;
use super::effect::{Effect, PlaceholderChange, PlaceholderWrite};
use super::holds::{HoldReason, Subject};
use super::notices::Topic;
use super::{State, Step, gauge};
use crate::node_groups::{NodeGroup, NodeGroups};

/// The time between two decisions about placeholders. An autoscaler looks at pods as often.
const PERIOD: Duration = Duration::from_secs(10);

/// Seconds for which a pod must exist before a node is asked for: evictions or pods that end may
/// make room at once.
const WAIT: i64 = 10;

/// Seconds from the creation of a node to its GPUs: cloud providers install the driver first.
const START_TIME: i64 = 900;

/// The most pods that one decision is about, with those of their groups.
const MAX_PODS: usize = 512;

/// Steps of the plan for one group of nodes: about 10 ms of CPU time.
const STEPS: u64 = 20_000;

/// The most nodes of a group: a placeholder names all of them.
const MAX_NODES: usize = 2_000;

/// The groups of nodes, their nodes and placeholders.
#[derive(Debug, Default)]
pub(super) struct Placeholders {
    settings: Option<Arc<NodeGroups>>,
    nodes: BTreeMap<NodeGroupName, BTreeMap<NodeName, GroupNode>>,
    pods: BTreeMap<PodName, Placeholder>,
    /// Pods with a write that has not ended, each with its group.
    writing: BTreeMap<PodName, NodeGroupName>,
    /// The time of the next decision.
    due: Moment,
}

/// A node of a group.
#[derive(Debug)]
struct GroupNode {
    host_name: String,
    /// `metadata.creationTimestamp`, in seconds since the epoch.
    created: i64,
}

/// A placeholder pod that exists.
#[derive(Debug)]
struct Placeholder {
    uid: String,
    group: NodeGroupName,
    node: Option<NodeName>,
    /// It is being deleted.
    is_ending: bool,
    /// Its containers have ended, or it was rejected by the kubelet.
    has_ended: bool,
}

/// The state of a group.
#[derive(Debug, Default)]
struct GroupState {
    /// Nodes of the group that may publish GPUs yet.
    starting: usize,
    /// Starting nodes with a placeholder.
    kept: usize,
    /// Placeholders without a node, by name.
    waiting: Vec<PodName>,
    /// Placeholders to delete because they are not needed any more.
    done: Vec<PodName>,
    /// Nodes of placeholders that publish no GPUs.
    without_gpus: Vec<NodeName>,
    /// A placeholder's node has published its GPUs.
    is_proven: bool,
}

impl Placeholders {
    pub(super) fn new(settings: Option<NodeGroups>) -> Self {
        Self { settings: settings.map(Arc::new), ..Self::default() }
    }

    /// Takes in a node.
    pub(super) fn apply_node(&mut self, object: &Node) {
        let Some(settings) = &self.settings else { return };
        let metadata = &object.metadata;
        let Some(name) = metadata.name.as_deref().and_then(|name| NodeName::new(name).ok()) else {
            return;
        };
        let label = |key: &str| metadata.labels.as_ref().and_then(|labels| labels.get(key));
        let host_name = label(HOST_NAME_LABEL).cloned();
        let created = metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second());
        for group in &settings.groups {
            let mut selector = group.node_selector.iter();
            let is_selected = selector.all(|(key, value)| label(key) == Some(value));
            let nodes = self.nodes.entry(group.name.clone()).or_default();
            match host_name.clone().filter(|_| is_selected) {
                Some(host_name) => {
                    nodes.insert(name.clone(), GroupNode { host_name, created });
                }
                None => drop(nodes.remove(&name)),
            }
        }
    }

    /// Takes in the deletion of a node.
    pub(super) fn remove_node(&mut self, object: &Node) {
        let name = object.metadata.name.as_deref().and_then(|name| NodeName::new(name).ok());
        if let Some(name) = name {
            self.nodes.values_mut().for_each(|nodes| drop(nodes.remove(&name)));
        }
    }

    /// Takes in a pod.
    pub(super) fn apply_pod(&mut self, object: &Pod) {
        let Some((name, group)) = self.identity(object) else { return };
        let spec = object.spec.as_ref();
        let node = spec.and_then(|spec| spec.node_name.as_deref());
        let phase = object.status.as_ref().and_then(|status| status.phase.as_deref());
        let placeholder = Placeholder {
            uid: object.metadata.uid.clone().unwrap_or_default(),
            group,
            node: node.and_then(|node| NodeName::new(node).ok()),
            is_ending: object.metadata.deletion_timestamp.is_some(),
            has_ended: matches!(phase, Some("Succeeded" | "Failed")),
        };
        self.pods.insert(name, placeholder);
    }

    /// Takes in the deletion of a pod.
    pub(super) fn remove_pod(&mut self, object: &Pod) {
        if let Some((name, _)) = self.identity(object) {
            self.pods.remove(&name);
        }
    }

    /// Returns the name and the group of a placeholder; none for other pods.
    fn identity(&self, object: &Pod) -> Option<(PodName, NodeGroupName)> {
        let settings = self.settings.as_ref()?;
        let group = object.metadata.labels.as_ref()?.get(NODE_GROUP_LABEL)?;
        let is_ours = object.metadata.namespace.as_deref() == Some(settings.namespace.as_str());
        let name = object.metadata.name.as_deref().filter(|_| is_ours)?;
        Some((PodName::new(name).ok()?, NodeGroupName::new(group).ok()?))
    }

    /// Returns true if the group is in the settings.
    pub(super) fn has_group(&self, group: &NodeGroupName) -> bool {
        self.settings.iter().flat_map(|settings| &settings.groups).any(|g| g.name == *group)
    }

    /// Returns the names of the nodes of a group.
    fn nodes_of(&self, group: &NodeGroupName) -> impl Iterator<Item = &NodeName> {
        self.nodes.get(group).into_iter().flat_map(BTreeMap::keys)
    }

    /// Returns a name that no placeholder of the group has.
    fn free_name(&self, group: &NodeGroup) -> Option<PodName> {
        let name = |number| PodName::new(format!("tessera-node-{}-{number}", group.name)).ok();
        let is_free =
            |name: &PodName| !self.pods.contains_key(name) && !self.writing.contains_key(name);
        (0..group.maximum).filter_map(name).find(is_free)
    }

    /// Returns the number of placeholders of each group.
    fn count(&self) -> BTreeMap<NodeGroupName, i64> {
        let groups = self.settings.iter().flat_map(|settings| &settings.groups);
        let count = |group: &NodeGroup| {
            gauge(self.pods.values().filter(|pod| pod.group == group.name).count())
        };
        groups.map(|group| (group.name.clone(), count(group))).collect()
    }
}

impl State {
    /// Returns the state of a group.
    fn group_state(&self, group: &NodeGroupName, wall: i64) -> GroupState {
        let Self { placeholders, index, .. } = self;
        let mut state = GroupState::default();
        let nodes = placeholders.nodes.get(group);
        let is_young = |node: &GroupNode| wall < node.created.saturating_add(START_TIME);
        let is_starting =
            |(name, node): &(&NodeName, &GroupNode)| is_young(node) && !index.publishes_gpus(name);
        state.starting = nodes.into_iter().flatten().filter(is_starting).count();
        for (name, pod) in placeholders.pods.iter().filter(|(_, pod)| pod.group == *group) {
            if pod.is_ending || placeholders.writing.contains_key(name) {
                continue;
            }
            let Some(node) = pod.node.as_ref().filter(|_| !pod.has_ended) else {
                let list = if pod.has_ended { &mut state.done } else { &mut state.waiting };
                list.push(name.clone());
                continue;
            };
            let is_published = index.publishes_gpus(node);
            let is_known = nodes.and_then(|nodes| nodes.get(node));
            let is_late = !is_published && is_known.is_some_and(|node| !is_young(node));
            state.is_proven |= is_published;
            if is_late {
                state.without_gpus.push(node.clone());
            }
            if is_published || is_late || is_known.is_none() {
                state.done.push(name.clone());
            } else {
                state.kept += 1;
            }
        }
        state
    }
}

impl Step<'_> {
    /// Creates and deletes placeholders where the demand for nodes differs from them.
    pub(super) fn ask_for_nodes(&mut self, round: &Round) {
        let State { placeholders, planning, .. } = &*self.state;
        let Some(settings) = placeholders.settings.clone() else { return };
        if self.now < placeholders.due {
            self.wake_at(Some(placeholders.due));
            return;
        }
        self.figures.placeholders = Some(placeholders.count());
        if planning.backlog.is_empty() && placeholders.pods.is_empty() {
            return;
        }
        let due = self.now + PERIOD;
        self.state.placeholders.due = due;
        self.wake_at(Some(due));
        let mut pods = self.pods_without_node(round);
        for group in &settings.groups {
            let demand = self.demand_of(group, &pods);
            pods.retain(|pod| {
                !demand.pods.contains(&pod.uid) && !demand.on_existing.contains(&pod.uid)
            });
            self.settle_group(&settings, group, demand);
        }
        self.delete_of_unknown_groups(&settings);
    }

    /// Returns the first pods of the backlog that wait for nodes. Those that kube-scheduler has
    /// refused on a node are none of them: a further node would not help.
    fn pods_without_node(&self, round: &Round) -> Vec<PendingPod> {
        let State { planning, preemptions, .. } = &*self.state;
        let decided: BTreeSet<&PodUid> = round.plan.decisions.iter().map(|one| &one.pod).collect();
        let waits = |pod: &PendingPod| {
            let is_refused = pod.members().any(|member| !member.excluded_nodes.is_empty());
            let is_served = decided.contains(&pod.uid) || preemptions.is_under_way(&pod.uid);
            pod.created.saturating_add(WAIT) <= self.wall && !is_refused && !is_served
        };
        let first = planning.backlog.first_in_order(MAX_PODS, waits);
        first.into_iter().cloned().collect()
    }

    /// Returns the nodes that these pods need of a group.
    fn demand_of(&self, group: &NodeGroup, pods: &[PendingPod]) -> NodeDemand {
        let State { placeholders, index, planning, .. } = &*self.state;
        let nodes = || placeholders.nodes_of(&group.name);
        let template = index.template_of_group(nodes()).filter(|_| !pods.is_empty());
        let Some(template) = template else { return NodeDemand::default() };
        let snapshot = index.snapshot_of_group(template, nodes(), pods);
        let settings = planning.settings_of_preemption(STEPS);
        node_demand(&snapshot, template, group.maximum, pods, settings)
    }

    fn settle_group(&mut self, settings: &NodeGroups, group: &NodeGroup, demand: NodeDemand) {
        let GroupState { starting, kept, mut waiting, done, without_gpus, is_proven } =
            self.state.group_state(&group.name, self.wall);
        let subject = Subject::node_group(&group.name);
        if is_proven {
            self.state.holds.end_of(&subject, HoldReason::NodeWithoutGpus);
        }
        for node in without_gpus {
            let group = &group.name;
            tracing::warn!(%group, %node, "a new node has published no GPUs in 15 minutes");
            self.state.holds.hold(subject.clone(), HoldReason::NodeWithoutGpus, self.now);
        }
        done.iter().for_each(|pod| self.delete_placeholder(settings, pod));
        let holds = &self.state.holds;
        let is_useless = holds.is_held(&subject, HoldReason::NodeWithoutGpus, self.now);
        let is_failing = holds.is_held(&subject, HoldReason::PlaceholderFailed, self.now);
        let demanded = if is_useless { 0 } else { demand.nodes };
        // One that waits may get its place on a node that has just been added.
        while waiting.len() + kept > demanded
            && let Some(pod) = waiting.pop()
        {
            self.delete_placeholder(settings, &pod);
        }
        let missing = demanded.saturating_sub(starting + waiting.len());
        let is_writing = self.state.placeholders.writing.values().any(|of| *of == group.name);
        if missing > 0 && !is_failing && !is_writing {
            self.create_placeholders(settings, group, missing);
            self.notify_asking(settings, group, demand.pods);
        }
    }

    fn create_placeholders(&mut self, settings: &NodeGroups, group: &NodeGroup, count: usize) {
        let nodes = self.state.placeholders.nodes.get(&group.name);
        let existing: Vec<String> =
            nodes.into_iter().flatten().map(|(_, node)| node.host_name.clone()).collect();
        if existing.len() > MAX_NODES {
            let (group, nodes) = (&group.name, existing.len());
            tracing::warn!(%group, nodes, "a group of over {MAX_NODES} nodes gets no placeholders");
            return;
        }
        for _ in 0..count {
            let Some(name) = self.state.placeholders.free_name(group) else { return };
            tracing::info!(group = %group.name, pod = %name, "asking for a node");
            let object = pod::placeholder(settings, group, &name, existing.clone());
            let change = PlaceholderChange::Create(Box::new(object));
            self.write_placeholder(settings, &group.name, name, change);
        }
    }

    fn delete_placeholder(&mut self, settings: &NodeGroups, pod: &PodName) {
        let Some(known) = self.state.placeholders.pods.get(pod) else { return };
        let (group, change) = (known.group.clone(), PlaceholderChange::Delete(known.uid.clone()));
        tracing::info!(%group, %pod, "deleting a placeholder pod");
        self.write_placeholder(settings, &group, pod.clone(), change);
    }

    /// Deletes the placeholders of groups that are not in the settings any more.
    fn delete_of_unknown_groups(&mut self, settings: &NodeGroups) {
        let State { placeholders, .. } = &*self.state;
        let unknown = placeholders.pods.iter().filter(|(name, pod)| {
            !placeholders.has_group(&pod.group)
                && !pod.is_ending
                && !placeholders.writing.contains_key(*name)
        });
        let unknown: Vec<PodName> = unknown.map(|(name, _)| name.clone()).collect();
        unknown.iter().for_each(|pod| self.delete_placeholder(settings, pod));
    }

    fn write_placeholder(
        &mut self,
        settings: &NodeGroups,
        group: &NodeGroupName,
        pod: PodName,
        change: PlaceholderChange,
    ) {
        self.state.placeholders.writing.insert(pod.clone(), group.clone());
        let namespace = settings.namespace.clone();
        self.effects.push(Effect::WritePlaceholder(PlaceholderWrite { namespace, pod, change }));
    }

    /// Takes in the end of a write of a placeholder.
    pub(super) fn absorb_placeholder(&mut self, pod: &PodName, is_done: bool) {
        let State { placeholders, holds, .. } = &mut *self.state;
        let Some(group) = placeholders.writing.remove(pod) else { return };
        let subject = Subject::node_group(&group);
        if is_done {
            holds.end_of(&subject, HoldReason::PlaceholderFailed);
        } else {
            holds.hold(subject, HoldReason::PlaceholderFailed, self.now);
            self.figures.placeholder_errors += 1;
        }
    }

    /// Tells the pods that nodes are asked for.
    fn notify_asking(&mut self, settings: &NodeGroups, group: &NodeGroup, pods: BTreeSet<PodUid>) {
        let note = tessera_messages::node_requested_message(&settings.namespace, &group.name);
        for pod in pods {
            let reason = events::NODE_REQUESTED;
            self.notify_incident(&pod, Topic::Pod, reason, note.clone(), None);
        }
    }
}
