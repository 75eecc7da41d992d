//! Topology of groups: all pods of a group on nodes with one value of a label.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::collections::BTreeSet;
use std::sync::Arc;

use builders::*;
use proptest::prelude::*;
use tessera_allocator::model::{GroupTopology, PendingPod};
use tessera_allocator::{
    AllocationPlan, FeatureGates, PlanSettings, Planner, Policy, RefusalCause, plan,
};
use tessera_api::names::NodeName;

const RACK: &str = "topology.example.com/rack";
const ZONE: &str = "topology.kubernetes.io/zone";

/// A cluster with nodes of racks, each with this number of GPUs of 80 GiB. The node's name begins
/// with that of the rack, and the rack's with its zone.
fn racks(nodes: &[(&str, &[usize])]) -> Cluster {
    let mut cluster = Cluster::new();
    for (rack, gpus) in nodes {
        for (number, gpus) in gpus.iter().enumerate() {
            let name = format!("{rack}-{number}");
            let devices = (0..*gpus).map(|gpu_number| gpu(&format!("gpu-{gpu_number}"), "80Gi"));
            cluster = cluster.node(&name, devices.collect());
            cluster.put_node(&name, |node| {
                node.labels.insert(RACK.into(), (*rack).into());
                node.labels.insert(ZONE.into(), rack[..1].into());
            });
        }
    }
    cluster
}

/// A group of pods that need a GPU each.
fn group(size: usize, topology: GroupTopology) -> PendingPod {
    let mut pods = (0..size).map(|number| share_pod(&format!("train-{number}"), "80Gi", "0"));
    let first = pods.next().unwrap();
    let topology = Some(Arc::new(topology));
    PendingPod { together_with: pods.collect(), topology, ..first }
}

fn required(label: &str) -> GroupTopology {
    GroupTopology { required: Some(label.into()), ..GroupTopology::default() }
}

fn preferred(label: &str) -> GroupTopology {
    GroupTopology { preferred: Some(label.into()), ..GroupTopology::default() }
}

fn planned(cluster: &Cluster, pod: &PendingPod) -> AllocationPlan {
    let settings = PlanSettings { policy: Policy::Spread, ..PlanSettings::default() };
    plan(&cluster.0, std::slice::from_ref(pod), settings)
}

/// Returns the racks of the decisions, and the number of decisions.
fn used(plan: &AllocationPlan) -> (BTreeSet<&str>, usize) {
    let rack = |node: &NodeName| plan.decisions.iter().position(|one| one.node == *node);
    let nodes = plan.decisions.iter().map(|decision| &decision.node);
    let racks = nodes.filter(|node| rack(node).is_some());
    (racks.map(|node| node.as_str().rsplit_once('-').unwrap().0).collect(), plan.decisions.len())
}

/// Returns how many pods fit where all are required to be, by the refusals of a group.
fn shortfall(plan: &AllocationPlan) -> Option<(usize, &str)> {
    let RefusalCause::GroupDoesNotFit(shortfall) = &*plan.refusals.first()?.cause else {
        return None;
    };
    Some((shortfall.placed, shortfall.topology.as_deref()?))
}

#[test]
fn group_gets_all_of_its_gpus_in_one_rack() {
    let cluster = racks(&[("a1", &[1, 1]), ("a2", &[1, 1, 1]), ("b1", &[1, 1])]);
    assert_eq!(used(&planned(&cluster, &group(3, required(RACK)))), (["a2"].into(), 3));
    assert_eq!(used(&planned(&cluster, &group(5, required(ZONE)))), (["a1", "a2"].into(), 5));
}

#[test]
fn the_smallest_rack_that_suffices_comes_first() {
    let cluster = racks(&[("a1", &[8]), ("a2", &[2]), ("a3", &[4])]);
    assert_eq!(used(&planned(&cluster, &group(1, required(RACK)))).1, 1);
    let cluster = racks(&[("a1", &[1; 8]), ("a2", &[1; 2]), ("a3", &[1; 4])]);
    assert_eq!(used(&planned(&cluster, &group(3, required(RACK)))), (["a3"].into(), 3));
    assert_eq!(used(&planned(&cluster, &group(2, required(RACK)))), (["a2"].into(), 2));
}

#[test]
fn group_that_fits_in_no_rack_is_refused_with_the_label() {
    let mut cluster = racks(&[("a1", &[1, 1]), ("a2", &[2])]);
    let plan = planned(&cluster, &group(3, required(RACK)));
    assert_eq!((used(&plan).1, shortfall(&plan)), (0, Some((2, RACK))));
    assert_eq!(plan.refusals.len(), 3);
    assert_eq!(used(&planned(&cluster, &group(3, preferred(RACK)))).1, 3);
    // Nodes without the label are in no rack.
    cluster.put_node("a2-0", |node| drop(node.labels.remove(RACK)));
    assert_eq!(shortfall(&planned(&cluster, &group(3, required(RACK)))), Some((2, RACK)));
    let unknown = planned(&cluster, &group(2, required("no-such-label")));
    assert_eq!(shortfall(&unknown), Some((0, "no-such-label")));
}

#[test]
fn one_rack_is_preferred_within_the_required_zone() {
    let both = |size| group(size, GroupTopology { required: Some(ZONE.into()), ..preferred(RACK) });
    let cluster = racks(&[("a1", &[1, 1]), ("a2", &[1, 1]), ("b1", &[1, 1, 1])]);
    assert_eq!(used(&planned(&cluster, &both(3))), (["b1"].into(), 3));
    assert_eq!(used(&planned(&cluster, &both(4))), (["a1", "a2"].into(), 4));
    assert_eq!(shortfall(&planned(&cluster, &both(5))), Some((4, ZONE)));
}

#[test]
fn pods_join_those_of_their_group_that_have_devices() {
    let cluster = racks(&[("a1", &[4]), ("a2", &[1])]);
    let placed = [NodeName::new("a2-0").unwrap()];
    let joins =
        |size, topology| group(size, GroupTopology { placed: placed.clone().into(), ..topology });
    assert_eq!(used(&planned(&cluster, &joins(1, required(RACK)))), (["a2"].into(), 1));
    assert_eq!(shortfall(&planned(&cluster, &joins(2, required(RACK)))), Some((1, RACK)));
    assert_eq!(used(&planned(&cluster, &joins(2, preferred(RACK)))).1, 2);
}

#[test]
fn group_of_unequal_pods_finds_the_rack_for_all() {
    let mut cluster = racks(&[("a1", &[1, 1]), ("a2", &[1])]);
    cluster = cluster.node("a2-1", vec![gpu("gpu-0", "192Gi")]);
    cluster.put_node("a2-1", |node| drop(node.labels.insert(RACK.into(), "a2".into())));
    let mut pods = group(1, required(RACK));
    pods.together_with = vec![share_pod("large", "160Gi", "0")];
    assert_eq!(used(&planned(&cluster, &pods)), (["a2"].into(), 2));
}

proptest! {
    #[test]
    fn group_gets_devices_exactly_if_a_rack_has_enough(
        gpus in prop::collection::vec(prop::collection::vec(0..4_usize, 1..4), 1..6),
        size in 1..9_usize,
    ) {
        let names: Vec<String> = (0..gpus.len()).map(|number| format!("a{number}")).collect();
        let of_rack = |(name, gpus)| (String::as_str(name), Vec::as_slice(gpus));
        let nodes: Vec<(&str, &[usize])> = names.iter().zip(&gpus).map(of_rack).collect();
        let cluster = racks(&nodes);
        let settings = PlanSettings::default();
        let mut planner = Planner::from_snapshot(&cluster.0, FeatureGates::default());
        let (strict, loose) = (group(size, required(RACK)), group(size, preferred(RACK)));
        let total: usize = gpus.iter().flatten().sum();
        let most: usize = gpus.iter().map(|gpus| gpus.iter().sum()).max().unwrap();
        for _ in 0..2 {
            let plan = planner.plan(std::slice::from_ref(&strict), settings);
            let (racks, number) = used(&plan);
            prop_assert_eq!(number, if size <= most { size } else { 0 });
            prop_assert!(racks.len() <= 1, "{:?}", racks);
            if most < size && size <= total {
                prop_assert_eq!(shortfall(&plan), Some((most, RACK)));
            }
            // What was tried is undone, and the caches hold nothing of it.
            let plan = planner.plan(std::slice::from_ref(&loose), settings);
            prop_assert_eq!(used(&plan).1, if size <= total { size } else { 0 });
            prop_assert_eq!(used(&plan).0.len() == 1, size <= most);
            let single = PendingPod { created: 1, ..share_pod("single", "80Gi", "0") };
            let plan = planner.plan(&[strict.clone(), single], settings);
            let of_group = if size <= most { size } else { 0 };
            prop_assert_eq!(plan.decisions.len(), of_group + usize::from(total > of_group));
        }
    }
}
