//! Groups: which pods are planned together, and which cannot be planned.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Value, json};
use tessera_allocator::model::PodUid;
use tessera_api::names::NodeName;
use tessera_index::{GroupProblem, Index, PlanningBlocker, PodGroupApi};

const GROUP: &str = "gpu.tessera.dev/pod-group";
const SIZE: &str = "gpu.tessera.dev/pod-group-size";

/// An index that is fed with pods, each with one claim of its name.
struct Fed {
    index: Index,
    version: u64,
}

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

impl Fed {
    fn new() -> Self {
        let mut index = Index::default();
        let selector = json!({"cel": {"expression": "device.driver == 'gpu.tessera.dev'"}});
        let class =
            json!({"metadata": {"name": "gpu.tessera.dev"}, "spec": {"selectors": [selector]}});
        index.apply_class(read(class)).unwrap();
        Self { index, version: 0 }
    }

    fn claim(&mut self, name: &str, is_allocated: bool) {
        self.version += 1;
        let request = json!({"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev"}});
        let mut claim = json!({
            "metadata": {"namespace": "n", "name": name, "uid": format!("uid-{name}"),
                "resourceVersion": self.version.to_string()},
            "spec": {"devices": {"requests": [request]}},
        });
        if is_allocated {
            claim["status"] = json!({"allocation": {"devices": {"results": [{
                "request": "gpu", "driver": "gpu.tessera.dev", "pool": "node-a", "device": "gpu-0",
                "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77",
                "consumedCapacity": {"memory": "1Gi"},
            }]}}});
        }
        self.index.apply_claim(&Arc::new(read(claim))).unwrap();
    }

    fn pod(&mut self, name: &str, annotations: Value, change: impl FnOnce(&mut Value)) {
        self.claim(name, false);
        self.index.apply_pod(&read(pod(name, annotations, change)));
    }

    fn delete_pod(&mut self, name: &str) {
        self.index.remove_pod(&read(pod(name, json!({}), |_| {})));
    }

    /// The pods to plan, each with those that are decided together with it.
    fn units(&self) -> Vec<String> {
        let unit = |pod: &tessera_allocator::model::PendingPod| {
            let names: Vec<&str> = pod.members().map(|member| member.name.as_str()).collect();
            names.join("+")
        };
        self.index.work().pending.iter().map(unit).collect()
    }

    fn problems(&self) -> BTreeMap<String, GroupProblem> {
        let problem = |blocked: tessera_index::Blocked| match blocked.blocker {
            PlanningBlocker::Group(problem) => (blocked.pod.to_string(), problem),
            other => panic!("{other:?}"),
        };
        self.index.work().blocked.into_iter().map(problem).collect()
    }
}

fn pod(name: &str, annotations: Value, change: impl FnOnce(&mut Value)) -> Value {
    let mut pod = json!({
        "metadata": {"namespace": "n", "name": name, "uid": name, "annotations": annotations},
        "spec": {
            "containers": [], "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
        },
    });
    change(&mut pod);
    pod
}

/// The annotations of a pod of the group `train`.
fn of_size(size: u32) -> Value {
    json!({GROUP: "train", SIZE: size.to_string()})
}

fn bound(pod: &mut Value) {
    pod["spec"]["nodeName"] = "node-a".into();
}

fn incomplete(size: u32, present: u32) -> GroupProblem {
    GroupProblem::Incomplete { size, present }
}

#[test]
fn pods_of_a_group_are_planned_once_all_exist() {
    let mut fed = Fed::new();
    fed.pod("b", of_size(3), |_| {});
    fed.pod("a", of_size(3), |_| {});
    fed.pod("alone", json!({}), |_| {});
    assert_eq!(fed.units(), ["alone"]);
    let problems = fed.problems();
    assert_eq!(problems.into_values().collect::<Vec<_>>(), [incomplete(3, 2); 2]);
    fed.pod("c", of_size(3), |_| {});
    assert_eq!(fed.units(), ["alone", "a+b+c"]);
    // Only the first stands for the group.
    assert!(fed.index.to_plan(&PodUid::new("a")).unwrap().is_some());
    assert!(fed.index.to_plan(&PodUid::new("b")).unwrap().is_none());
    fed.delete_pod("a");
    assert_eq!(fed.problems().len(), 2);
    assert!(fed.index.to_plan(&PodUid::new("b")).is_err());
}

#[test]
fn group_has_the_topology_of_its_first_waiting_pod() {
    let mut fed = Fed::new();
    let of = |label: &str| {
        let mut annotations = of_size(2);
        annotations["gpu.tessera.dev/pod-group-required-topology"] = label.into();
        annotations
    };
    let topology = |fed: &Fed| {
        let pending = fed.index.work().pending;
        let topology = pending[0].topology.clone()?;
        let placed: Vec<String> = topology.placed.iter().map(ToString::to_string).collect();
        Some((topology.required.clone()?, placed.join(" ")))
    };
    fed.pod("a", of("rack"), |_| {});
    fed.pod("b", of("zone"), |_| {});
    assert_eq!(topology(&fed), Some(("rack".to_owned(), String::new())));
    // One of the pods runs: the other one joins it.
    fed.pod("a", of("rack"), bound);
    assert_eq!(topology(&fed), Some(("zone".to_owned(), "node-a".to_owned())));
    fed.pod("b", of_size(2), |_| {});
    assert_eq!(topology(&fed), None);
}

#[test]
fn gated_pod_keeps_its_group_waiting() {
    let mut fed = Fed::new();
    fed.pod("a", of_size(2), |_| {});
    let gated = |pod: &mut Value| pod["spec"]["schedulingGates"] = json!([{"name": "kueue"}]);
    fed.pod("b", of_size(2), gated);
    assert_eq!(fed.problems(), [("a".to_owned(), incomplete(2, 1))].into());
    fed.pod("b", of_size(2), |_| {});
    assert_eq!(fed.units(), ["a+b"]);
}

#[test]
fn pods_that_have_devices_count_and_the_rest_is_planned() {
    let mut fed = Fed::new();
    for name in ["a", "b", "c"] {
        fed.pod(name, of_size(3), |_| {});
    }
    fed.claim("a", true);
    assert_eq!(fed.units(), ["b+c"]);
    fed.index.apply_pod(&read(pod("a", of_size(3), bound)));
    assert_eq!(fed.units(), ["b+c"]);
    // One that has ended well is not missing, one that has failed is.
    let ended = |phase: &'static str| {
        move |pod: &mut Value| {
            bound(pod);
            pod["status"] = json!({"phase": phase});
        }
    };
    fed.index.apply_pod(&read(pod("a", of_size(3), ended("Succeeded"))));
    assert_eq!(fed.units(), ["b+c"]);
    fed.index.apply_pod(&read(pod("a", of_size(3), ended("Failed"))));
    assert_eq!(fed.problems().into_values().collect::<Vec<_>>(), [incomplete(3, 2); 2]);
    fed.pod("d", of_size(3), |_| {});
    assert_eq!(fed.units(), ["b+c+d"]);
}

#[test]
fn pods_beyond_the_size_follow_once_the_group_is_placed() {
    let mut fed = Fed::new();
    for name in ["a", "b", "c", "d"] {
        fed.pod(name, of_size(2), |_| {});
    }
    assert_eq!(fed.units(), ["a+b"]);
    fed.claim("a", true);
    fed.claim("b", true);
    // One after the other.
    assert_eq!(fed.units(), ["c"]);
}

#[test]
fn group_is_known_by_what_its_pods_have_in_common() {
    let mut fed = Fed::new();
    let owned = |pod: &mut Value| {
        pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "batch/v1", "kind": "Job",
            "name": "j", "uid": "job", "controller": true}]);
    };
    let label = |name: &'static str, value: &'static str| {
        move |pod: &mut Value| pod["metadata"]["labels"] = json!({name: value})
    };
    let size = json!({SIZE: "2"});
    for number in [1, 2] {
        fed.pod(&format!("job-{number}"), size.clone(), owned);
        let of = label("leaderworkerset.sigs.k8s.io/group-key", "k");
        fed.pod(&format!("lws-{number}"), size.clone(), of);
        let of = label("jobset.sigs.k8s.io/jobset-name", "s");
        fed.pod(&format!("set-{number}"), size.clone(), of);
        let of = label("kueue.x-k8s.io/pod-group-name", "k");
        let count = json!({"kueue.x-k8s.io/pod-group-total-count": "2"});
        fed.pod(&format!("kueue-{number}"), count, of);
    }
    // Kueue admits the first pod before the others exist.
    let of = label("kueue.x-k8s.io/pod-group-name", "fast");
    let fast = json!({"kueue.x-k8s.io/pod-group-total-count": "2",
        "kueue.x-k8s.io/pod-group-fast-admission": "true"});
    fed.pod("fast", fast, of);
    let units: BTreeSet<String> = fed.units().into_iter().collect();
    let expected = ["fast", "job-1+job-2", "lws-1+lws-2", "set-1+set-2", "kueue-1+kueue-2"];
    assert_eq!(units, expected.map(str::to_owned).into());
}

#[test]
fn size_that_cannot_be_used_blocks_the_pod() {
    let mut fed = Fed::new();
    fed.pod("without-size", json!({GROUP: "g"}), |_| {});
    fed.pod("without-name", json!({SIZE: "2"}), |_| {});
    for (number, size) in ["0", "513", "two", "-1", ""].iter().enumerate() {
        fed.pod(&format!("bad-{number}"), json!({GROUP: "bad", SIZE: size}), |_| {});
    }
    let problems = fed.problems();
    assert_eq!(problems["without-size"], GroupProblem::SizeMissing);
    assert_eq!(problems["without-name"], GroupProblem::NameMissing);
    let bad = problems.iter().filter(|(name, _)| name.starts_with("bad"));
    assert_eq!(bad.filter(|(_, problem)| **problem == GroupProblem::SizeInvalid).count(), 5);
    assert!(fed.units().is_empty());
    // A group of one needs no name.
    fed.pod("single", json!({SIZE: "1"}), |_| {});
    assert_eq!(fed.units(), ["single"]);
}

#[test]
fn change_of_one_pod_concerns_its_group() {
    let mut fed = Fed::new();
    for name in ["a", "b", "c"] {
        fed.pod(name, of_size(3), |_| {});
    }
    fed.index.take_changed_pods();
    let changed = |fed: &mut Fed| {
        let mut changed = fed.index.take_changed_pods();
        fed.index.complete_groups(&mut changed);
        changed.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    fed.delete_pod("a");
    assert_eq!(changed(&mut fed), ["a", "b", "c"]);
    // It leaves for another group.
    fed.index.apply_pod(&read(pod("b", json!({GROUP: "other", SIZE: "1"}), |_| {})));
    assert_eq!(changed(&mut fed), ["b", "c"]);
    assert_eq!(fed.units(), ["b"]);
}

#[test]
fn holders_know_the_pods_of_their_group_that_hold_devices() {
    let mut fed = Fed::new();
    fed.index.apply_node(&read(json!({"metadata": {"name": "node-a"}}))).unwrap();
    let slice = json!({
        "metadata": {"name": "slice-a"},
        "spec": {
            "driver": "gpu.tessera.dev", "nodeName": "node-a",
            "pool": {"name": "node-a", "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0"}],
        },
    });
    fed.index.apply_slice(&read(slice)).unwrap();
    let bound = |priority: i32, node: &'static str| {
        move |pod: &mut Value| {
            pod["spec"]["nodeName"] = node.into();
            pod["spec"]["priority"] = priority.into();
            pod["status"]["phase"] = "Running".into();
        }
    };
    let group = json!({GROUP: "train", SIZE: "4"});
    fed.pod("here", group.clone(), bound(1, "node-a"));
    fed.pod("other", group.clone(), bound(7, "node-b"));
    fed.pod("waits", group.clone(), |_| {});
    fed.pod("ended", group, |pod| {
        bound(9, "node-a")(pod);
        pod["status"]["phase"] = "Succeeded".into();
    });
    fed.pod("alone", json!({GROUP: "small", SIZE: "1"}), bound(1, "node-a"));
    ["here", "other", "ended", "alone"].iter().for_each(|name| fed.claim(name, true));
    let holders = fed.index.holders_on(&NodeName::new("node-a").unwrap());
    let groups: BTreeMap<_, _> =
        holders.pods.into_iter().map(|holder| (holder.pod.to_string(), holder.group)).collect();
    assert_eq!(groups.keys().cloned().collect::<Vec<_>>(), ["alone", "here"]);
    assert_eq!(groups["alone"], None);
    let group = groups["here"].as_ref().unwrap();
    let members: Vec<String> = group.members.iter().map(ToString::to_string).collect();
    assert_eq!((members, group.priority), (vec!["here".to_owned(), "other".to_owned()], 7));
}

/// Has a pod name the PodGroup `train` of an API.
fn in_pod_group(api: PodGroupApi) -> impl Fn(&mut Value) {
    move |pod| match api {
        PodGroupApi::Kubernetes => {
            pod["spec"]["schedulingGroup"] = json!({"podGroupName": "train"});
        }
        PodGroupApi::Volcano => {
            pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] = "train".into();
        }
    }
}

const APIS: [PodGroupApi; 2] = [PodGroupApi::Kubernetes, PodGroupApi::Volcano];

impl Fed {
    /// An index of a cluster that serves both kinds of PodGroup.
    fn with_pod_groups() -> Self {
        let mut fed = Self::new();
        APIS.iter().for_each(|api| fed.index.set_pod_groups_served(*api, true));
        fed
    }

    /// Applies the PodGroup `train` with a minimum of pods. Returns true if it is news.
    fn pod_group(&mut self, api: PodGroupApi, minimum: i32) -> bool {
        let metadata = json!({"namespace": "n", "name": "train"});
        match api {
            PodGroupApi::Kubernetes => self.index.apply_pod_group(&read(json!({
                "metadata": metadata,
                "spec": {"schedulingPolicy": {"gang": {"minCount": minimum}}},
            }))),
            PodGroupApi::Volcano => self.index.apply_volcano_pod_group(&read(json!({
                "metadata": metadata, "spec": {"minMember": minimum, "queue": "default"},
            }))),
        }
    }
}

#[test]
fn pods_of_a_pod_group_are_planned_once_its_minimum_exists() {
    for api in APIS {
        let mut fed = Fed::with_pod_groups();
        assert!(fed.pod_group(api, 3));
        fed.pod("a", json!({}), in_pod_group(api));
        fed.pod("b", json!({}), in_pod_group(api));
        assert_eq!(fed.units(), Vec::<String>::new(), "{api:?}");
        assert_eq!(fed.problems()["a"], incomplete(3, 2), "{api:?}");
        fed.pod("c", json!({}), in_pod_group(api));
        fed.pod("d", json!({}), in_pod_group(api));
        assert_eq!(fed.units(), ["a+b+c"], "{api:?}");
        // Those beyond the minimum follow one by one.
        for name in ["a", "b", "c"] {
            fed.claim(name, true);
        }
        assert_eq!(fed.units(), ["d"], "{api:?}");
    }
}

#[test]
fn pod_group_without_a_usable_minimum_blocks_its_pods() {
    for api in APIS {
        let mut fed = Fed::with_pod_groups();
        fed.pod("a", json!({}), in_pod_group(api));
        assert_eq!(fed.problems()["a"], GroupProblem::PodGroupMissing, "{api:?}");
        fed.pod_group(api, 513);
        assert_eq!(fed.problems()["a"], GroupProblem::PodGroupTooLarge, "{api:?}");
    }
}

#[test]
fn pod_group_that_starts_pods_alone_is_no_group() {
    for api in APIS {
        let mut fed = Fed::with_pod_groups();
        fed.pod("a", json!({}), in_pod_group(api));
        fed.pod("b", json!({}), in_pod_group(api));
        for minimum in [1, 0, -1] {
            fed.pod_group(api, minimum);
            assert_eq!(fed.units(), ["a", "b"], "{api:?} {minimum}");
            assert_eq!(fed.index.group_of(&PodUid::new("a")), None);
        }
        fed.pod_group(api, 2);
        assert_eq!(fed.units(), ["a+b"], "{api:?}");
        // The API server does not have the kind any more: a name of an object means nothing.
        fed.index.set_pod_groups_served(api, false);
        assert_eq!(fed.units(), ["a", "b"], "{api:?}");
    }
    let mut fed = Fed::with_pod_groups();
    fed.pod("a", json!({}), in_pod_group(PodGroupApi::Kubernetes));
    fed.index.apply_pod_group(&read(json!({
        "metadata": {"namespace": "n", "name": "train"},
        "spec": {"schedulingPolicy": {"basic": {}}},
    })));
    assert_eq!(fed.units(), ["a"]);
}

#[test]
fn change_of_a_pod_group_concerns_its_pods() {
    for api in APIS {
        let mut fed = Fed::with_pod_groups();
        fed.pod("a", json!({}), in_pod_group(api));
        fed.pod("b", json!({}), in_pod_group(api));
        fed.pod("other", json!({}), |_| {});
        fed.index.take_changed_pods();
        let changed = |fed: &mut Fed| -> Vec<String> {
            fed.index.take_changed_pods().iter().map(ToString::to_string).collect()
        };
        assert!(fed.pod_group(api, 3));
        assert_eq!(changed(&mut fed), vec!["a", "b"]);
        assert!(!fed.pod_group(api, 3), "nothing has changed");
        assert_eq!(changed(&mut fed), Vec::<String>::new());
        fed.index.set_pod_groups_served(api, false);
        assert_eq!(changed(&mut fed), vec!["a", "b"]);
    }
}

#[test]
fn size_and_topology_of_the_pod_come_before_the_pod_group() {
    let api = PodGroupApi::Kubernetes;
    let mut fed = Fed::with_pod_groups();
    fed.index.apply_pod_group(&read(json!({
        "metadata": {"namespace": "n", "name": "train"},
        "spec": {
            "schedulingPolicy": {"gang": {"minCount": 2}},
            "schedulingConstraints": {"topology": [{"key": "rack"}]},
        },
    })));
    let required = |fed: &Fed| fed.index.work().pending[0].topology.clone()?.required.clone();
    fed.pod("a", json!({}), in_pod_group(api));
    fed.pod("b", json!({}), in_pod_group(api));
    assert_eq!(fed.units(), ["a+b"]);
    assert_eq!(required(&fed).as_deref(), Some("rack"));
    let own = json!({SIZE: "3", "gpu.tessera.dev/pod-group-required-topology": "zone"});
    fed.pod("a", own, in_pod_group(api));
    assert_eq!(fed.problems()["b"], incomplete(3, 2));
    fed.pod("c", json!({}), in_pod_group(api));
    assert_eq!(fed.units(), ["a+b+c"]);
    assert_eq!(required(&fed).as_deref(), Some("zone"));
}
