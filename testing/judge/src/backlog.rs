//! Cost of a step of the controller beside pods that wait for devices: a step pays for what has
//! changed, not for the pods that wait.
//!
//! ```text
//! generated objects --Event--> Core::step --Effect--> answered as an API server does
//!                              CPU time of each step
//! ```
//!
//! Each GPU of the cluster has a share, and every waiting pod requests more than is left of any.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use serde::Serialize;
use serde_json::Value;
use tessera_api::names::{POD_GROUP_ANNOTATION, POD_GROUP_SIZE_ANNOTATION};
use tessera_controller::core::event::{Change, WatchedObject};

use crate::controller::{Controller, FirstPlans, INTERVAL};
use crate::scale::{
    ClusterSize, EventCost, GPUS, allocated_claim, claim, ms, node_object, pod, running_pod,
};

/// Memory of the share on each GPU, in MiB; of a mixed cluster the most.
const USED_MIB: usize = 60_000;

/// Least memory that a waiting pod requests, in MiB: more than half of a GPU.
const WANTED_MIB: usize = 45_000;

/// Memory that the one pod requests that fits at first, in MiB.
const SMALL_MIB: usize = 4_000;

/// Begin of the names of waiting pods.
const WAITING: &str = "waiting-";

/// Size of a cluster with waiting pods.
#[derive(Debug, Clone, Copy)]
pub struct BacklogSize {
    /// Number of nodes, with eight GPUs each.
    pub nodes: usize,
    /// Number of waiting pods.
    pub pods: usize,
    /// Number of different requests among them.
    pub shapes: usize,
    /// Number of waiting pods that get devices together.
    pub group: usize,
    /// Number of times that each event is measured.
    pub events: usize,
    /// True if almost no two GPUs have the same amount of free memory, so that no two nodes are in
    /// the same state.
    pub is_mixed: bool,
}

/// Costs of a backlog.
#[derive(Debug, Clone, Serialize)]
pub struct BacklogReport {
    /// CPU time after the lists until the first decision, for the last pod in the order, in ms.
    pub first_decision_ms: f64,
    /// CPU time until all other pods are refused for the first time, in ms.
    pub first_plan_ms: f64,
    /// Longest step until then, in ms.
    pub longest_step_ms: f64,
    /// CPU time until all events about the pods are published, in ms.
    pub notices_ms: f64,
    /// Longest step with an audit, in ms: one a minute.
    pub audit_ms: f64,
    /// Costs of the steps that answer single events.
    pub events: Vec<EventCost>,
    /// Costs of all that follows within 100 ms, for the same events.
    pub rest: Vec<EventCost>,
}

/// Builds the cluster and measures it.
///
/// # Panics
/// Panics if a generated object is invalid, or a pod is allocated devices that it cannot have.
#[must_use]
pub fn run(size: BacklogSize) -> BacklogReport {
    let mut controller = Controller::with_cluster(size);
    for number in 0..size.pods {
        controller.add(waiting_pod(BacklogPod { number, group: size.group }, size));
    }
    controller.add(pod_objects("zzz-small", SMALL_MIB));
    let FirstPlans { first_decision, all, longest_step } = controller.list();
    let notices = controller.settle();
    assert_eq!(controller.allocated, 1, "no other pod fits before devices are freed");
    BacklogReport {
        first_decision_ms: ms(first_decision),
        first_plan_ms: ms(all),
        longest_step_ms: ms(longest_step),
        notices_ms: ms(notices),
        audit_ms: 0.0,
        events: Vec::new(),
        rest: Vec::new(),
    }
    .with_events(&mut controller, size)
}

impl BacklogReport {
    fn with_events(mut self, controller: &mut Controller, size: BacklogSize) -> Self {
        (self.events, self.rest) = controller.events(size);
        self.audit_ms = ms(controller.audit);
        self
    }
}

impl Controller {
    fn with_cluster(size: BacklogSize) -> Self {
        let annotate = move |pod: &mut Pod| {
            let number = pod.metadata.name.as_deref().and_then(|name| name.strip_prefix(WAITING));
            if let Some(number) = number.and_then(|number| number.parse().ok()) {
                let group = size.group;
                pod.metadata.annotations = BacklogPod { number, group }.annotations();
            }
        };
        let mut controller = Self::new(Box::new(annotate), |_| false);
        controller.add_nodes(size.nodes);
        for share in 0..size.nodes * GPUS {
            controller.add(share_objects(share, size));
        }
        controller
    }

    /// Measures each kind of event: the step that answers it, and what follows until the next one.
    fn events(&mut self, size: BacklogSize) -> (Vec<EventCost>, Vec<EventCost>) {
        let (mut costs, mut rest) = (Vec::new(), Vec::new());
        let mut measure = |event, changes: &dyn Fn(usize) -> Vec<Change>| {
            let once = |n| (self.step(changes(n)), self.run_until(self.now + INTERVAL));
            let (steps, later) = (0..size.events).map(once).unzip();
            costs.push(EventCost::of(event, steps));
            rest.push(EventCost::of(event, later));
            self.settle();
        };
        measure("nothing that planning reads", &|n| {
            vec![Change::Applied(WatchedObject::Pod(Arc::new(share_pod(n, size))))]
        });
        measure("node cordoned", &|n| vec![node_changed(n * 17 % size.nodes, true)]);
        measure("node uncordoned", &|n| vec![node_changed(n * 17 % size.nodes, false)]);
        let late = |n| BacklogPod { number: size.pods + n, group: 1 };
        measure("pod created that fits nowhere", &|n| applied(waiting_pod(late(n), size)));
        measure("it is deleted", &|n| deleted(waiting_pod(late(n), size)));
        measure("GPU freed, and taken by the first pod or group", &|n| {
            deleted(share_objects(n * 131 % (size.nodes * GPUS), size))
        });
        let used = size.events / size.group * size.group;
        assert_eq!(self.allocated as usize, 1 + used, "each freed GPU is used");
        (costs, rest)
    }
}

fn applied(objects: Vec<WatchedObject>) -> Vec<Change> {
    objects.into_iter().map(Change::Applied).collect()
}

fn deleted(objects: Vec<WatchedObject>) -> Vec<Change> {
    objects.into_iter().rev().map(Change::Deleted).collect()
}

fn cluster(size: BacklogSize) -> ClusterSize {
    ClusterSize { nodes: size.nodes, shares: size.nodes * GPUS, events: size.events }
}

fn share_pod(share: usize, size: BacklogSize) -> k8s_openapi::api::core::v1::Pod {
    running_pod(share, cluster(size))
}

fn share_objects(share: usize, size: BacklogSize) -> Vec<WatchedObject> {
    let used = if size.is_mixed { USED_MIB - share * 7919 % 10_000 } else { USED_MIB };
    let claim = Arc::new(allocated_claim(share, used, cluster(size)));
    let pod = Arc::new(share_pod(share, size));
    vec![WatchedObject::Claim(claim), WatchedObject::Pod(pod)]
}

/// A waiting pod, and the number of pods of its group.
#[derive(Debug, Clone, Copy)]
struct BacklogPod {
    number: usize,
    group: usize,
}

impl BacklogPod {
    /// Returns the annotations that state its group; none if it is alone.
    fn annotations(self) -> Option<BTreeMap<String, String>> {
        let name = format!("group-{}", self.number / self.group);
        let size = self.group.to_string();
        let annotations = [(POD_GROUP_ANNOTATION, name), (POD_GROUP_SIZE_ANNOTATION, size)];
        let annotations = annotations.map(|(key, value)| (key.to_owned(), value));
        (self.group > 1).then(|| annotations.into())
    }
}

fn waiting_pod(pod: BacklogPod, size: BacklogSize) -> Vec<WatchedObject> {
    // The pods of a group have one request.
    let shape = pod.number / pod.group % size.shapes;
    objects_of(&format!("{WAITING}{}", pod.number), WANTED_MIB + shape, pod.annotations())
}

fn pod_objects(name: &str, memory_mib: usize) -> Vec<WatchedObject> {
    objects_of(name, memory_mib, None)
}

fn objects_of(
    name: &str,
    memory_mib: usize,
    annotations: Option<BTreeMap<String, String>>,
) -> Vec<WatchedObject> {
    let claim = Arc::new(claim(name, &format!("{memory_mib}Mi"), Value::Null));
    let mut pod = pod(name, None);
    pod.metadata.annotations = annotations;
    vec![WatchedObject::Claim(claim), WatchedObject::Pod(Arc::new(pod))]
}

/// Returns the change of a node that is cordoned, or not any more.
pub(crate) fn node_changed(node: usize, is_cordoned: bool) -> Change {
    let mut object = node_object(node);
    object.spec.get_or_insert_default().unschedulable = Some(is_cordoned);
    Change::Applied(WatchedObject::Node(Arc::new(object)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_freed_gpu_goes_to_a_waiting_pod() {
        for is_mixed in [false, true] {
            let size =
                BacklogSize { nodes: 10, pods: 30, shapes: 3, group: 1, events: 5, is_mixed };
            let report = run(size);
            assert_eq!(report.events.len(), 6);
            assert!(report.first_decision_ms > 0.0);
            assert!(report.first_plan_ms >= report.first_decision_ms);
        }
    }

    #[test]
    fn freed_gpus_go_to_a_group_once_they_are_enough() {
        let size =
            BacklogSize { nodes: 10, pods: 32, shapes: 2, group: 4, events: 9, is_mixed: false };
        assert_eq!(run(size).events.len(), 6);
    }

    #[test]
    fn step_costs_no_more_where_ten_times_as_many_pods_wait() {
        let group = 1;
        let size =
            |pods| BacklogSize { nodes: 20, pods, shapes: 3, group, events: 20, is_mixed: false };
        let [few, many] = [150, 1500].map(|pods| run(size(pods)));
        for (few, many) in few.events.iter().zip(&many.events) {
            let ratio = many.p50_ms / few.p50_ms.max(0.01);
            assert!(ratio < 4.0, "{}: {few:?} and {many:?}", few.event);
        }
    }
}
