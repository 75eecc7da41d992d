//! Placeholder pods: how many ask for nodes, and when they go.

use std::time::Duration;

use serde_json::{Value, json};
use tessera_api::events;
use tessera_api::names::{Namespace, NodeGroupName, PodName};
use tessera_controller::core::effect::PlaceholderChange;
use tessera_controller::core::event::{Event, WatchedKind};
use tessera_controller::node_groups::{NodeGroup, NodeGroups};

use crate::objects;
use crate::world::World;

/// Longer than the time between two decisions.
const PERIOD: Duration = Duration::from_secs(11);

fn group(name: &str, maximum: usize) -> NodeGroup {
    let selector = [("pool".to_owned(), name.to_owned())];
    NodeGroup { name: NodeGroupName::new(name).unwrap(), node_selector: selector.into(), maximum }
}

fn settings(groups: Vec<NodeGroup>) -> NodeGroups {
    NodeGroups {
        namespace: Namespace::new("tessera-system").unwrap(),
        image: "pause".to_owned(),
        priority_class_name: "tessera-placeholder".to_owned(),
        groups,
    }
}

/// A cluster with one node of one GPU in group `a`, of which nothing is free.
fn world(maximum: usize) -> World {
    let mut world = World::new();
    world.ask_for_nodes(settings(vec![group("a", maximum)]));
    world.add_group_node("node-a", "a");
    world.publish("node-a");
    world.add_bound_pod("holder", "80Gi");
    world.settle();
    world
}

impl World {
    /// Adds a node of a group that publishes no GPUs yet.
    fn add_group_node(&mut self, name: &str, pool: &str) {
        let mut node = objects::node(name);
        let seconds = self.now().as_secs();
        let (minutes, seconds) = (seconds / 60, seconds % 60);
        let time = format!("1970-01-01T{:02}:{:02}:{seconds:02}Z", minutes / 60, minutes % 60);
        node["metadata"]["creationTimestamp"] = time.into();
        node["metadata"]["labels"] = json!({"pool": pool, "kubernetes.io/hostname": name});
        self.put(WatchedKind::Node, node);
        self.deliver_all();
    }

    /// Publishes one GPU of a node.
    fn publish(&mut self, node: &str) {
        self.put(WatchedKind::Slice, objects::slice(node, 1));
        self.deliver_all();
    }

    /// Carries out the writes of placeholders, until a decision starts none.
    fn write_placeholders(&mut self) {
        while let Some((name, change)) = self.open_placeholders.pop_first() {
            match change {
                PlaceholderChange::Create(pod) => {
                    let mut pod = json!(*pod);
                    pod["metadata"]["uid"] = format!("uid-of-{name}").into();
                    pod["status"] = json!({"phase": "Pending"});
                    self.put(WatchedKind::Pod, pod);
                }
                PlaceholderChange::Delete(uid) => {
                    assert_eq!(uid, format!("uid-of-{name}"));
                    self.delete(WatchedKind::Pod, name.as_str());
                }
            }
            self.step([Event::PlaceholderEnded { pod: name, is_done: true }]);
            self.deliver_all();
        }
    }

    /// Lets a decision pass and its writes be carried out. Returns the placeholders, each with the
    /// node where it is.
    fn placeholders(&mut self) -> Vec<(String, String)> {
        self.pass(PERIOD);
        self.write_placeholders();
        self.settle();
        let names = self.names(WatchedKind::Pod).into_iter();
        let ours = names.filter(|name| name.starts_with("tessera-node-"));
        let node = |name: &String| {
            let pod = self.get(WatchedKind::Pod, name).unwrap();
            pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned()
        };
        ours.map(|name| (name.clone(), node(&name))).collect()
    }

    fn bind_to(&mut self, pod: &str, node: &str) {
        self.edit(WatchedKind::Pod, pod, |pod| pod["spec"]["nodeName"] = node.into());
        self.deliver_all();
    }

    fn told(&self, pod: &str) -> usize {
        let is_it = |notice: &&tessera_controller::core::effect::Notice| {
            notice.pod.name.as_str() == pod && notice.reason.name() == events::NODE_REQUESTED.name()
        };
        self.notices.iter().filter(is_it).count()
    }
}

fn at(name: &str, node: &str) -> (String, String) {
    (name.to_owned(), node.to_owned())
}

#[test]
fn placeholder_asks_for_a_node_until_its_gpus_are_published() {
    let mut world = world(3);
    assert_eq!(world.placeholders(), [], "nothing waits");
    world.add_pod("p", "80Gi");
    world.settle();
    assert_eq!(world.placeholders(), [at("tessera-node-a-0", "")]);
    assert_eq!(world.told("p"), 1);
    world.add_group_node("node-new", "a");
    assert_eq!(world.placeholders(), [at("tessera-node-a-0", "")], "it may get its place there");
    world.bind_to("tessera-node-a-0", "node-new");
    assert_eq!(world.placeholders(), [at("tessera-node-a-0", "node-new")], "no GPUs yet");
    world.put(WatchedKind::Slice, objects::slice("node-new", 0));
    assert_eq!(world.placeholders(), [at("tessera-node-a-0", "node-new")], "none found");
    world.publish("node-new");
    world.settle();
    assert!(world.place("p").unwrap().starts_with("node-new/"));
    assert_eq!(world.placeholders(), []);
    assert_eq!(world.told("p"), 1);
}

#[test]
fn placeholder_fits_on_new_nodes_of_the_group_only() {
    let mut world = world(1);
    world.add_group_node("node-b", "b");
    world.add_pod("p", "80Gi");
    world.settle();
    world.placeholders();
    let pod = world.get(WatchedKind::Pod, "tessera-node-a-0").unwrap();
    let spec = &pod["spec"];
    assert_eq!(spec["nodeSelector"], json!({"pool": "a"}));
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    let terms = &spec["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"];
    let is_new =
        json!({"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-a"]});
    assert_eq!(*terms, json!([{"matchExpressions": [is_new]}]));
    let beside = &spec["affinity"]["podAntiAffinity"][required][0];
    assert_eq!(beside["labelSelector"]["matchLabels"], pod["metadata"]["labels"].only_group());
    assert_eq!(spec["priorityClassName"], "tessera-placeholder");
    assert_eq!(spec["resourceClaims"], Value::Null);
}

trait OnlyGroup {
    fn only_group(&self) -> Value;
}

impl OnlyGroup for Value {
    /// Returns the label of the group alone.
    fn only_group(&self) -> Value {
        json!({"gpu.tessera.dev/node-group": self["gpu.tessera.dev/node-group"]})
    }
}

#[test]
fn nodes_are_as_many_as_the_pods_need_and_the_maximum_allows() {
    let mut world = world(2);
    for pod in ["p", "q", "r"] {
        world.add_pod(pod, "80Gi");
    }
    world.settle();
    let two = [at("tessera-node-a-0", ""), at("tessera-node-a-1", "")];
    assert_eq!(world.placeholders(), two);
    assert_eq!(world.placeholders(), two, "no more");
    world.delete(WatchedKind::Pod, "q");
    world.delete(WatchedKind::Pod, "r");
    world.deliver_all();
    assert_eq!(world.placeholders(), [at("tessera-node-a-0", "")]);
    world.delete(WatchedKind::Pod, "p");
    world.deliver_all();
    assert_eq!(world.placeholders(), []);
}

#[test]
fn nodes_that_are_starting_count() {
    let mut world = world(3);
    world.add_group_node("node-new", "a");
    world.add_pod("p", "80Gi");
    world.settle();
    assert_eq!(world.placeholders(), []);
    world.add_pod("q", "80Gi");
    world.settle();
    assert_eq!(world.placeholders(), [at("tessera-node-a-0", "")]);
    let pod = world.get(WatchedKind::Pod, "tessera-node-a-0").unwrap().to_string();
    assert!(pod.contains("node-new"), "it must not get its place on the node that starts");
}

#[test]
fn new_leader_continues_with_what_exists() {
    let mut world = world(3);
    for pod in ["p", "q"] {
        world.add_pod(pod, "80Gi");
    }
    world.settle();
    let before = world.placeholders();
    assert_eq!(before.len(), 2);
    world.ask_for_nodes(settings(vec![group("a", 3)]));
    assert_eq!(world.placeholders(), before);
    // The group is not in the settings any more.
    world.ask_for_nodes(settings(vec![group("b", 3)]));
    assert_eq!(world.placeholders(), []);
}

#[test]
fn node_without_gpus_stops_the_group_for_a_time() {
    let mut world = world(3);
    world.add_pod("p", "80Gi");
    world.settle();
    world.placeholders();
    world.add_group_node("node-new", "a");
    world.bind_to("tessera-node-a-0", "node-new");
    for _ in 0..(900 / PERIOD.as_secs()) {
        assert_eq!(world.placeholders().len(), 1);
    }
    world.pass(PERIOD);
    assert_eq!(world.placeholders(), [], "the node may be removed");
    world.delete(WatchedKind::Node, "node-new");
    world.deliver_all();
    assert_eq!(world.placeholders(), [], "another one is likely to be as useless");
    world.pass(Duration::from_secs(900));
    assert_eq!(world.placeholders(), [at("tessera-node-a-0", "")]);
}

#[test]
fn refused_placeholder_is_tried_again_later() {
    let mut world = world(3);
    world.add_pod("p", "80Gi");
    world.settle();
    world.pass(PERIOD);
    let name = PodName::new("tessera-node-a-0").unwrap();
    for pause in [10, 20] {
        world.open_placeholders.remove(&name).expect("it is being created");
        world.step([Event::PlaceholderEnded { pod: name.clone(), is_done: false }]);
        assert_eq!(world.figures.placeholder_errors, 1);
        world.pass(Duration::from_secs(pause) - Duration::from_millis(1));
        assert!(world.open_placeholders.is_empty());
        world.pass(PERIOD);
    }
    assert!(world.open_placeholders.contains_key(&name));
}

#[test]
fn pods_that_no_new_node_would_help_ask_for_none() {
    let mut world = world(3);
    world.add_pod("large", "96Gi");
    world.put(WatchedKind::Claim, objects::claim("elsewhere", "80Gi"));
    let mut elsewhere = objects::pod("elsewhere", &["elsewhere"]);
    elsewhere["spec"]["nodeSelector"] = json!({"pool": "b"});
    world.put(WatchedKind::Pod, elsewhere);
    world.settle();
    assert_eq!(world.placeholders(), []);
}

#[test]
fn pod_that_kube_scheduler_has_refused_asks_for_none() {
    let mut world = World::new();
    world.ask_for_nodes(settings(vec![group("a", 3)]));
    world.add_group_node("node-a", "a");
    world.publish("node-a");
    world.add_pod("p", "80Gi");
    world.settle();
    let mut waited = Duration::ZERO;
    while waited < Duration::from_secs(300) {
        if world.place("p").is_some() {
            world.report_unschedulable("p", "0/1 nodes are available: 1 Insufficient cpu.");
        }
        world.settle();
        world.pass(Duration::from_secs(1));
        assert!(world.open_placeholders.is_empty(), "after {waited:?}");
        waited += Duration::from_secs(1);
    }
}

#[test]
fn first_group_that_fits_is_asked() {
    let mut world = world(3);
    world.ask_for_nodes(settings(vec![group("b", 1), group("a", 3)]));
    world.add_group_node("node-b", "b");
    world.put(WatchedKind::Slice, objects::slice("node-b", 2));
    world.deliver_all();
    for pod in ["x", "y"] {
        world.add_pod(pod, "80Gi");
    }
    world.settle();
    for pod in ["p", "q", "r"] {
        world.add_pod(pod, "80Gi");
    }
    world.settle();
    // A node of group b has two GPUs, and the group has room for one node.
    assert_eq!(world.placeholders(), [at("tessera-node-a-0", ""), at("tessera-node-b-0", "")]);
}
