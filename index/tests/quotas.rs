//! Sums of quotas: at every moment those of a count from the objects alone.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_api::names::Namespace;
use tessera_api::quota::{GpuQuota, QuotaAmounts};
use tessera_index::Index;

/// A change of an object. Numbers are names.
#[derive(Debug, Clone)]
enum Change {
    /// A claim, not allocated or with this memory of a GPU, in GiB.
    Claim(u8, Option<u32>),
    DeleteClaim(u8),
    /// A pod that is bound with a claim, or has ended.
    Pod(u8, bool),
    DeletePod(u8),
    /// A quota of namespace 0 or 1.
    Quota(u8, bool),
    DeleteQuota(u8),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => (0u8..6, prop::option::of(1u32..=80)).prop_map(|(claim, gib)| Change::Claim(claim, gib)),
        1 => (0u8..6).prop_map(Change::DeleteClaim),
        2 => (0u8..6, any::<bool>()).prop_map(|(pod, runs)| Change::Pod(pod, runs)),
        1 => (0u8..6).prop_map(Change::DeletePod),
        2 => (0u8..2, any::<bool>()).prop_map(|(quota, of_class)| Change::Quota(quota, of_class)),
        1 => (0u8..2).prop_map(Change::DeleteQuota),
    ]
}

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

/// Claims and pods of even numbers are in one namespace, the others in another.
fn namespace(number: u8) -> String {
    format!("team-{}", number % 2)
}

fn claim(number: u8, gib: Option<u32>, version: usize) -> Value {
    let mut claim = json!({
        "metadata": {
            "name": format!("c{number}"), "namespace": namespace(number),
            "uid": format!("claim-{number}"), "resourceVersion": version.to_string(),
        },
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "a"}}]}},
    });
    if let Some(gib) = gib {
        claim["status"] = json!({"allocation": {"devices": {"results": [{
            "request": "gpu", "driver": "gpu.tessera.dev", "pool": "node-a", "device": "gpu-0",
            "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77",
            "consumedCapacity": {"memory": format!("{gib}Gi")},
        }]}}});
    }
    claim
}

fn pod(number: u8, runs: bool) -> Value {
    json!({
        "metadata": {
            "name": format!("p{number}"), "namespace": namespace(number), "uid": format!("pod-{number}"),
        },
        "spec": {
            "nodeName": "node-a", "containers": [{"name": "c"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": format!("c{number}")}],
        },
        "status": {"phase": if runs { "Running" } else { "Succeeded" }},
    })
}

fn quota(number: u8, of_class: bool) -> Value {
    let classes = if of_class { json!(["a"]) } else { json!([]) };
    json!({
        "metadata": {"name": "q", "namespace": namespace(number)},
        "spec": {"deviceClassNames": classes, "hard": {"memory": "100Gi", "gpus": 1}},
    })
}

fn gpu() -> ResourceSlice {
    read(json!({
        "metadata": {"name": "node-a"},
        "spec": {
            "driver": "gpu.tessera.dev", "nodeName": "node-a",
            "pool": {"name": "node-a", "generation": 1, "resourceSliceCount": 1},
            "devices": [{
                "name": "gpu-0", "allowMultipleAllocations": true,
                "capacity": {"memory": {"value": "80Gi"}},
            }],
        },
    }))
}

/// The objects of a cluster, and an index that has seen each change.
#[derive(Default)]
struct Cluster {
    index: Index,
    claims: BTreeMap<u8, Value>,
    pods: BTreeMap<u8, Value>,
    quotas: BTreeMap<u8, Value>,
    version: usize,
}

impl Cluster {
    fn apply(&mut self, change: &Change) {
        self.version += 1;
        match *change {
            Change::Claim(number, gib) => {
                let object = claim(number, gib, self.version);
                self.index.apply_claim(&Arc::new(read(object.clone()))).unwrap();
                self.claims.insert(number, object);
            }
            Change::DeleteClaim(number) => {
                if let Some(object) = self.claims.remove(&number) {
                    self.index.remove_claim(&read::<ResourceClaim>(object));
                }
            }
            Change::Pod(number, runs) => {
                let object = pod(number, runs);
                self.index.apply_pod(&read(object.clone()));
                self.pods.insert(number, object);
            }
            Change::DeletePod(number) => {
                if let Some(object) = self.pods.remove(&number) {
                    self.index.remove_pod(&read(object));
                }
            }
            Change::Quota(number, of_class) => {
                let object = quota(number, of_class);
                self.index.apply_quota(&read(object.clone())).unwrap();
                self.quotas.insert(number, object);
            }
            Change::DeleteQuota(number) => {
                if let Some(object) = self.quotas.remove(&number) {
                    self.index.remove_quota(&read::<GpuQuota>(object));
                }
            }
        }
    }
}

/// Returns the sums of each quota.
fn sums(index: &Index) -> BTreeMap<Namespace, QuotaAmounts> {
    index.quotas().map(|q| (q.namespace.clone(), q.state.used.clone())).collect()
}

/// Returns the sums by the devices that the index counts as taken.
fn recounted(index: &Index) -> BTreeMap<String, i64> {
    let mut sums = BTreeMap::new();
    for holding in index.holdings() {
        for result in holding.results {
            let memory = result.consumed.get("memory").and_then(|m| m.value_i64()).unwrap_or(0);
            *sums.entry(holding.namespace.to_string()).or_default() += memory;
        }
    }
    sums
}

proptest! {
    #[test]
    fn sums_are_those_of_the_devices_that_count_as_taken(
        changes in prop::collection::vec(change(), 1..60),
    ) {
        let mut cluster = Cluster::default();
        cluster.index.apply_slice(&gpu()).unwrap();
        for change in &changes {
            cluster.apply(change);
            let recounted = recounted(&cluster.index);
            for (namespace, used) in sums(&cluster.index) {
                let memory = used.iter().find(|(resource, _)| resource.name() == "memory");
                let memory = memory.and_then(|(_, amount)| amount.value_i64()).unwrap_or(0);
                let expected = recounted.get(namespace.as_str()).copied().unwrap_or(0);
                prop_assert_eq!(memory, expected, "{} after {:?}", namespace, change);
            }
        }
    }

    #[test]
    fn the_order_in_which_objects_arrive_changes_nothing(
        changes in prop::collection::vec(change(), 1..40),
    ) {
        let mut cluster = Cluster::default();
        cluster.index.apply_slice(&gpu()).unwrap();
        // What a deleted claim had is known only to an index that has seen it.
        let kept = changes.iter().filter(|c| !matches!(c, Change::DeleteClaim(_) | Change::Claim(_, None)));
        kept.for_each(|change| cluster.apply(change));
        let mut late = Index::default();
        for object in cluster.pods.values() {
            late.apply_pod(&read(object.clone()));
        }
        for object in cluster.claims.values() {
            late.apply_claim(&Arc::new(read(object.clone()))).unwrap();
        }
        for object in cluster.quotas.values() {
            late.apply_quota(&read(object.clone())).unwrap();
        }
        late.apply_slice(&gpu()).unwrap();
        late.overcommitted();
        prop_assert_eq!(sums(&late), sums(&cluster.index));
    }
}
