use serde_json::{Value, json};

use super::*;

const UID: &str = "1f0c2d3e-0000-4000-8000-000000000001";
const SHARE: &str = "2f0c2d3e-0000-4000-8000-000000000002";
const DEVICE: &str = "gpu-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77";

fn result() -> Value {
    json!({
        "request": "gpu", "driver": "gpu.tessera.dev", "pool": "node-a", "device": DEVICE, "shareID": SHARE,
        "consumedCapacity": {"memory": "19Gi", "cores": "25"},
    })
}

fn config(parameters: Value) -> Value {
    let parameters = {
        let mut whole = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig"});
        let fields = parameters.as_object().expect("an object").clone();
        whole.as_object_mut().expect("an object").extend(fields);
        whole
    };
    json!({"source": "FromClaim", "opaque": {"driver": "gpu.tessera.dev", "parameters": parameters}})
}

fn claim(results: Value, config: Value) -> ResourceClaim {
    serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "claim", "namespace": "ns", "uid": UID},
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": results, "config": config}},
            "reservedFor": [
                {"resource": "pods", "name": "pod-a", "uid": "p1"},
                {"apiGroup": "batch", "resource": "jobs", "name": "job", "uid": "j1"},
            ],
        },
    }))
    .expect("a claim")
}

fn check(claim: &ResourceClaim) -> Result<PreparableClaim, ClaimError> {
    PreparableClaim::check(
        claim,
        &ClaimUid::new(UID).expect("a UID"),
        &Namespace::new("ns").expect("a namespace"),
        &ClaimName::new("claim").expect("a name"),
        &PoolName::new("node-a").expect("a pool"),
    )
}

/// Returns the claim with one field of its only result set to `value`, or removed if that is null.
fn with(field: &str, value: Value) -> ResourceClaim {
    let mut result = result();
    let object = result.as_object_mut().expect("an object");
    if value.is_null() {
        object.remove(field)
    } else {
        object.insert(field.to_owned(), value)
    };
    claim(json!([result]), json!([]))
}

#[test]
fn reads_share_from_consumed_capacity() {
    let checked = check(&claim(json!([result()]), json!([]))).expect("fine");
    let [share] = &checked.shares[..] else { panic!("{checked:?}") };
    assert_eq!((share.memory_bytes, share.cores_percent, share.index), (19 << 30, 25, 0));
    assert_eq!(share.share_id.as_ref().map(ShareId::as_str), Some(SHARE));
}

#[test]
fn ignores_results_of_other_drivers() {
    let other =
        json!({"request": "nic", "driver": "other.example", "pool": "elsewhere", "device": "d"});
    let checked = check(&claim(json!([other, result()]), json!([]))).expect("fine");
    assert_eq!(checked.shares.len(), 1);
    assert_eq!(checked.shares[0].index, 1);
    assert_eq!(check(&claim(json!([other]), json!([]))), Err(ClaimError::NothingOfOurs));
}

#[test]
fn refuses_replaced_or_unallocated_claim() {
    let mut replaced = claim(json!([result()]), json!([]));
    replaced.metadata.uid = Some("another".to_owned());
    assert!(
        matches!(check(&replaced), Err(ClaimError::Replaced { found, .. }) if found == "another")
    );

    let mut pending = claim(json!([result()]), json!([]));
    pending.status = None;
    assert!(matches!(check(&pending), Err(ClaimError::NotAllocated { .. })));
}

#[test]
fn refuses_result_of_another_node() {
    let error = check(&with("pool", json!("node-b"))).expect_err("refused");
    assert!(
        error
            .to_string()
            .contains("results[0].pool: `node-b` is not the pool `node-a` of this node"),
        "{error}"
    );
}

#[test]
fn refuses_invalid_fields_by_name() {
    let cases = [
        ("consumedCapacity", Value::Null, "consumedCapacity.memory is not set"),
        ("consumedCapacity", json!({"memory": "1Gi"}), "consumedCapacity.cores is not set"),
        (
            "consumedCapacity",
            json!({"memory": "much", "cores": "1"}),
            "consumedCapacity.memory is malformed",
        ),
        (
            "consumedCapacity",
            json!({"memory": "0", "cores": "1"}),
            "consumedCapacity.memory: 0 is not",
        ),
        (
            "consumedCapacity",
            json!({"memory": "-1", "cores": "1"}),
            "consumedCapacity.memory: -1 is not",
        ),
        (
            "consumedCapacity",
            json!({"memory": "1Gi", "cores": "101"}),
            "consumedCapacity.cores: 101 is not",
        ),
        (
            "consumedCapacity",
            json!({"memory": "1Gi", "cores": "2500m"}),
            "consumedCapacity.cores: 2500m is not",
        ),
        ("adminAccess", json!(true), "adminAccess: true is not supported in this version"),
        ("shareID", json!("../../etc"), "shareID is malformed"),
        ("device", json!("GPU/0"), "device is malformed"),
        ("request", json!("a b"), "request is malformed"),
    ];
    for (field, value, expected) in cases {
        let error = check(&with(field, value)).expect_err(expected).to_string();
        assert!(error.contains("results[0].") && error.contains(expected), "{error}");
    }
}

#[test]
fn refuses_invalid_parameters_by_field() {
    let refused = |parameters| {
        let error =
            check(&claim(json!([result()]), json!([config(parameters)]))).expect_err("refused");
        tessera_runtime::error_chain::chain(&error)
    };
    assert!(refused(json!({"speed": 1})).contains("speed"), "an unknown field");
    assert!(refused(json!({"sharing": "TimeSlicing"})).contains("not supported in this version"));
    let foreign = json!({"source": "FromClaim", "opaque": {"driver": "other.example", "parameters": {"x": 1}}});
    check(&claim(json!([result()]), json!([foreign])))
        .expect("parameters of another driver are ignored");
}

#[test]
fn reads_oversubscription_from_parameters() {
    let spills = |parameters| {
        let checked = check(&claim(json!([result()]), json!([config(parameters)]))).expect("fine");
        checked.shares[0].oversubscribe
    };
    assert!(spills(json!({"memory": {"oversubscribe": true}})));
    assert!(!spills(json!({"memory": {"oversubscribe": false}})) && !spills(json!({})));
}

#[test]
fn holds_containers_to_less_than_is_reserved() {
    let held = |parameters: Value| {
        let claim = claim(json!([result()]), json!([config(parameters)]));
        let shares = check(&claim).expect("valid").shares;
        (shares[0].memory_bytes, shares[0].cores_percent, shares[0].reserved)
    };
    let all = check(&claim(json!([result()]), json!([]))).expect("valid").shares[0].clone();
    let reserved = Reserved { memory_bytes: all.memory_bytes, cores_percent: all.cores_percent };
    let limited = held(json!({"memory": {"limit": "1Gi"}}));
    assert_eq!(limited, (1 << 30, all.cores_percent, Some(reserved)));
    let beyond = held(json!({"memory": {"limit": "1Ti"}}));
    assert_eq!(beyond, (all.memory_bytes, all.cores_percent, None), "at most what is reserved");
    let exclusive = held(json!({"exclusive": true, "compute": {"limit": 10}}));
    assert_eq!(exclusive, (all.memory_bytes, 10, Some(reserved)));
}

#[test]
fn mps_claim_has_exactly_one_gpu() {
    let by_mps = || json!([config(json!({"sharing": "MPS"}))]);
    let one = check(&claim(json!([result()]), by_mps())).expect("one GPU");
    assert!(one.shares[0].mps);
    assert!(!check(&claim(json!([result()]), json!([]))).expect("one GPU").shares[0].mps);
    let error = check(&claim(json!([result(), result()]), by_mps())).expect_err("two").to_string();
    assert!(error.contains("a claim of exactly one GPU, and this one was allocated 2"), "{error}");
}

#[test]
fn returns_reserving_pods_only() {
    let pods = reserving_pods(&claim(json!([result()]), json!([])));
    let names: Vec<_> = pods
        .iter()
        .map(|pod| (pod.namespace.as_str(), pod.name.as_str(), pod.uid.as_str()))
        .collect();
    assert_eq!(names, [("ns", "pod-a", "p1")]);
}
