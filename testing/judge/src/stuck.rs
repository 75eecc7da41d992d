//! Cost of a step of the controller beside pods that get no devices until a user changes them. Any
//! tenant can create thousands of them, so no step may pay for each.
//!
//! ```text
//! generated objects --Event--> Core::step --Effect--> answered as an API server does
//!                              CPU time of each step
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use k8s_openapi::api::core::v1::Pod;
use serde::Serialize;
use serde_json::Value;
use tessera_api::names::{POD_GROUP_ANNOTATION, POD_GROUP_SIZE_ANNOTATION};
use tessera_controller::core::event::{Change, WatchedObject};

use crate::backlog::node_changed;
use crate::controller::{Controller, INTERVAL};
use crate::scale::{EventCost, claim, ms, node_name, pod};

/// Begin of the names of pods that are stuck.
const STUCK: &str = "stuck-";

/// Number of pods of a group that is not complete; one more is stated.
const MEMBERS: usize = 7;

/// Memory that each pod requests: there is room for all.
const MEMORY: &str = "1Gi";

/// More memory than a GPU has.
const TOO_MUCH: &str = "100Gi";

/// Cause for which pods get no devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum StuckCause {
    /// The last pod of each group is not created.
    IncompleteGroup,
    /// A policy of the API server refuses each write of the claims.
    RefusedWrite,
    /// The pods were created with `spec.nodeName`, and their claims do not fit there.
    BoundPod,
    /// The API server does not accept events about pods that fit nowhere.
    RefusedEvent,
}

/// Size of a cluster with pods that are stuck.
#[derive(Debug, Clone, Copy)]
pub struct StuckSize {
    /// Number of nodes, with eight GPUs each.
    pub nodes: usize,
    /// Number of pods that are stuck.
    pub pods: usize,
    /// Number of times that each event is measured.
    pub events: usize,
}

/// Costs beside pods that are stuck.
#[derive(Debug, Clone, Serialize)]
pub struct StuckReport {
    /// Cause for which they are.
    pub cause: StuckCause,
    /// CPU time of ten minutes in which nothing happens, in ms.
    pub ten_minutes_ms: f64,
    /// Costs of the steps that answer single events.
    pub events: Vec<EventCost>,
}

/// Builds the cluster and measures it.
///
/// # Panics
/// Panics if a generated object is invalid, or a pod beside those that are stuck gets no devices.
#[must_use]
pub fn run(cause: StuckCause, size: StuckSize) -> StuckReport {
    let is_stuck: fn(&str) -> bool = |name| name.starts_with(STUCK);
    let is_never: fn(&str) -> bool = |_| false;
    let refuses = if cause == StuckCause::RefusedWrite { is_stuck } else { is_never };
    let mut controller = Controller::new(Box::new(|_| {}), refuses);
    controller.takes_events = cause != StuckCause::RefusedEvent;
    controller.add_nodes(size.nodes);
    for number in 0..size.pods {
        controller.add(stuck_pod(number, cause, size));
    }
    controller.list();
    let mut took = Duration::ZERO;
    for _ in 0..2 {
        // The first ten minutes are those in which pauses grow.
        let end = controller.now + Duration::from_secs(600);
        took = controller.run_until(end);
    }
    assert_eq!(controller.allocated, 0, "pods that are stuck get no devices");
    let events = events(&mut controller, size);
    StuckReport { cause, ten_minutes_ms: ms(took), events }
}

fn events(controller: &mut Controller, size: StuckSize) -> Vec<EventCost> {
    let mut costs = Vec::new();
    let mut measure = |event, changes: &dyn Fn(usize) -> Vec<Change>| {
        let once = |number| {
            let took = controller.step(changes(number));
            controller.run_until(controller.now + INTERVAL);
            took
        };
        costs.push(EventCost::of(event, (0..size.events).map(once).collect()));
    };
    measure("node cordoned or uncordoned", &|number| vec![node_changed(0, number % 2 == 0)]);
    measure("pod created that fits", &|number| {
        objects(&format!("free-{number}"), MEMORY, None, None).map(Change::Applied).into()
    });
    assert_eq!(controller.allocated as usize, size.events, "each of them gets its devices");
    costs
}

fn stuck_pod(number: usize, cause: StuckCause, size: StuckSize) -> [WatchedObject; 2] {
    let name = format!("{STUCK}{number}");
    let group = || {
        let name = format!("group-{}", number / MEMBERS);
        let size = (MEMBERS + 1).to_string();
        let annotations = [(POD_GROUP_ANNOTATION, name), (POD_GROUP_SIZE_ANNOTATION, size)];
        annotations.map(|(key, value)| (key.to_owned(), value)).into()
    };
    match cause {
        StuckCause::IncompleteGroup => objects(&name, MEMORY, None, Some(group())),
        StuckCause::RefusedWrite => objects(&name, MEMORY, None, None),
        StuckCause::BoundPod => {
            objects(&name, TOO_MUCH, Some(node_name(number % size.nodes)), None)
        }
        StuckCause::RefusedEvent => objects(&name, TOO_MUCH, None, None),
    }
}

fn objects(
    name: &str,
    memory: &str,
    node: Option<String>,
    annotations: Option<BTreeMap<String, String>>,
) -> [WatchedObject; 2] {
    let claim = Arc::new(claim(name, memory, Value::Null));
    let mut pod: Pod = pod(name, node);
    pod.metadata.annotations = annotations;
    // It was not started, so its claim can still be allocated.
    pod.status = None;
    [WatchedObject::Claim(claim), WatchedObject::Pod(Arc::new(pod))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_costs_no_more_beside_ten_times_as_many_stuck_pods() {
        for cause in StuckCause::value_variants() {
            let size = |pods| StuckSize { nodes: 100, pods, events: 20 };
            let [few, many] = [150, 1500].map(|pods| run(*cause, size(pods)));
            for (few, many) in few.events.iter().zip(&many.events) {
                let ratio = many.p50_ms / few.p50_ms.max(0.01);
                assert!(ratio < 4.0, "{cause:?}, {}: {few:?} and {many:?}", few.event);
            }
        }
    }
}
