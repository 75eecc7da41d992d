//! Errors occur only on devices that upstream's search reaches.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod builders;

use std::sync::Arc;

use builders::*;
use tessera_allocator::model::{
    AllocationMode, Attribute, Claim, Constraint, ConstraintKind, Device, DeviceSelector,
};
use tessera_allocator::{AllocateError, PlanSettings, Planner, Policy, SearchFailure, plan};
use tessera_api::names::{NodeName, PoolName};

fn allocate(cluster: &Cluster, claim: Claim) -> Result<(), AllocateError> {
    let mut planner = Planner::from_snapshot(&cluster.0, Default::default());
    let node = NodeName::new("node-a").unwrap();
    planner.allocate_on(&node, &[Arc::new(claim)], Policy::FirstFit, 1_000_000).map(drop)
}

#[test]
fn error_on_unreached_device_is_ignored() {
    let selecting = |name: &str| {
        let mut request = request(name, 1, &[("memory", "1Gi")]);
        let expression = "device.attributes['gpu.tessera.dev'].x == 1";
        request.alternatives[0].selectors.push(DeviceSelector::new(expression));
        request
    };
    let with_x = gpu("gpu-0", "80Gi").with("x", Attribute::Int(1));
    let mut cluster = Cluster::new().node("node-0", vec![with_x, gpu("gpu-1", "80Gi")]);
    // The selector fails on the more utilized device, which binpack prefers.
    cluster.use_share("node-0", "gpu-1", "1Gi", "1");
    for requests in [vec![selecting("a")], vec![selecting("a"), selecting("b")]] {
        let plan =
            plan(&cluster.0, &[pod("p", vec![claim("c", requests)])], PlanSettings::default());
        assert_eq!(plan.decisions.len(), 1, "{:?}", plan.refusals);
    }
}

#[test]
fn interchangeable_device_is_tried_if_errors_are_possible() {
    let gpus = (0..3)
        .map(|i| gpu(&format!("gpu-{i}"), "80Gi").with("model", Attribute::String("L40S".into())));
    let cluster = Cluster::new()
        .node("node-a", gpus.map(|device| Device { shared: false, ..device }).collect());
    let mut all = request("all", 1, &[]);
    all.alternatives[0].mode = AllocationMode::All;
    let mut claim = claim(
        "c",
        vec![request("one", 1, &[]), first_available("rest", vec![all, request("other", 1, &[])])],
    );
    let kind = ConstraintKind::Distinct("gpu.tessera.dev/model".to_owned());
    claim.constraints.push(Constraint { requests: Vec::new(), kind });
    // After GPU 0 the first device of "all" is in use; after GPU 1 it is free, but violates the
    // constraint.
    let answer = allocate(&cluster, claim);
    assert!(
        matches!(answer, Err(AllocateError::Failed(SearchFailure::AllViolatesConstraint(_)))),
        "{answer:?}"
    );
}

#[test]
fn device_error_precedes_error_of_later_invalid_pool() {
    let mut cluster = Cluster::new().node("node-a", vec![gpu("gpu-0", "80Gi")]);
    let twins = ["gpu-0", "gpu-0"].map(|name| gpu(name, "80Gi")).to_vec();
    let all_of = |expression: &str| {
        let mut all = request("all", 1, &[]);
        all.alternatives[0].mode = AllocationMode::All;
        all.alternatives[0].selectors.push(DeviceSelector::new(expression));
        claim("c", vec![all])
    };
    let broken = |pool: &str| {
        let mut slice = slice("node-a", twins.clone());
        slice.name = pool.to_owned();
        slice.pool.pool = PoolName::new(pool).unwrap();
        Arc::new(slice)
    };
    cluster.0.slices.insert("later".to_owned(), broken("node-b"));
    let answer = allocate(&cluster, all_of("device.nothing"));
    assert!(matches!(answer, Err(AllocateError::Failed(SearchFailure::Selector(_)))), "{answer:?}");
    let answer = allocate(&cluster, all_of("true"));
    assert!(
        matches!(answer, Err(AllocateError::Failed(SearchFailure::AllWithInvalidPool(_)))),
        "{answer:?}"
    );
    cluster.0.slices.insert("earlier".to_owned(), broken("a-pool"));
    let answer = allocate(&cluster, all_of("device.nothing"));
    assert!(
        matches!(answer, Err(AllocateError::Failed(SearchFailure::AllWithInvalidPool(_)))),
        "{answer:?}"
    );
}
