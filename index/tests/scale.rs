//! Cost of a step as the cluster grows: CPU time of this thread on a cluster compared with one of a
//! quarter of its size, in the same run. Linear work takes four times as much, quadratic work
//! sixteen times.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tessera_index::Index;

const NODES: usize = 60;
const GPUS: usize = 8;

/// The highest cost ratio of four times as many nodes.
const LINEAR: f64 = 8.0;

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

/// A cluster on which each GPU of `memory` GiB has two claims of 40 GiB that no pod has reserved.
fn cluster(nodes: usize, memory: u32) -> Index {
    let mut index = Index::default();
    for node in 0..nodes {
        publish(&mut index, node, 1, memory);
    }
    for holder in 0..nodes * GPUS * 2 {
        let (node, gpu) = (holder / 2 / GPUS, holder / 2 % GPUS);
        index.apply_claim(&Arc::new(read(claim(holder, node, gpu)))).unwrap();
        index.apply_pod(&read(pod(holder)));
    }
    index
}

fn publish(index: &mut Index, node: usize, generation: usize, memory: u32) {
    let name = format!("node-{node}");
    let device = |gpu: usize| {
        json!({
            "name": format!("gpu-{gpu}"), "allowMultipleAllocations": true,
            "capacity": {"memory": {"value": format!("{memory}Gi")}},
            "taints": [{"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"}],
        })
    };
    let slice = json!({
        "metadata": {"name": name},
        "spec": {
            "driver": "gpu.tessera.dev", "nodeName": name,
            "pool": {"name": name, "generation": generation, "resourceSliceCount": 1},
            "devices": (0..GPUS).map(device).collect::<Vec<_>>(),
        },
    });
    index.apply_slice(&read(slice)).unwrap();
}

fn claim(number: usize, node: usize, gpu: usize) -> Value {
    json!({
        "metadata": {
            "name": format!("c{number}"), "namespace": "default", "uid": format!("uid-c{number}"), "resourceVersion": "1",
        },
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev"}}]}},
        "status": {"allocation": {"devices": {"results": [{
            "request": "gpu", "driver": "gpu.tessera.dev", "pool": format!("node-{node}"), "device": format!("gpu-{gpu}"),
            "shareID": "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77", "consumedCapacity": {"memory": "40Gi"},
        }]}}},
    })
}

fn pod(number: usize) -> Value {
    json!({
        "metadata": {"name": format!("p{number}"), "namespace": "default", "uid": format!("uid-p{number}")},
        "spec": {
            "containers": [{"name": "c"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": format!("c{number}")}],
        },
    })
}

/// CPU time of this thread: other processes do not count.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap()
}

/// The shortest of three measurements.
fn cost<S>(mut prepare: impl FnMut() -> S, mut measured: impl FnMut(S) -> S) -> f64 {
    let once = |_| {
        let state = prepare();
        let start = cpu_time();
        let state = measured(state);
        let took = cpu_time().checked_sub(start).unwrap().as_secs_f64();
        drop(state);
        took
    };
    (0..3).map(once).fold(f64::INFINITY, f64::min)
}

fn assert_linear(of: impl Fn(usize) -> f64) {
    let (small, large) = (of(NODES), of(4 * NODES));
    assert!(large / small < LINEAR, "{:.1} ms and {:.1} ms", small * 1e3, large * 1e3);
}

#[test]
fn first_overcommit_check_is_linear_in_nodes() {
    assert_linear(|nodes| {
        cost(
            || cluster(nodes, 80),
            |mut index| {
                assert_eq!(index.overcommitted(), []);
                index
            },
        )
    });
}

#[test]
fn check_of_overcommitted_devices_is_linear_in_nodes() {
    assert_linear(|nodes| {
        cost(
            || cluster(nodes, 60),
            |mut index| {
                assert_eq!(index.overcommitted().len(), nodes * GPUS);
                index
            },
        )
    });
}

/// The highest cost of a step after a change of one claim, as a part of the first check.
const OF_THE_FIRST: f64 = 0.05;

#[test]
fn step_after_a_change_of_one_claim_does_not_pay_for_all() {
    let first = cost(
        || cluster(NODES, 80),
        |mut index| {
            index.overcommitted();
            assert!(index.unneeded().is_empty());
            index
        },
    );
    let next = cost(
        || {
            let mut index = cluster(NODES, 80);
            index.overcommitted();
            index.unneeded();
            index.remove_pod(&read(pod(0)));
            index
        },
        |mut index| {
            index.overcommitted();
            assert_eq!(index.unneeded().len(), 1);
            index
        },
    );
    assert!(next < first * OF_THE_FIRST, "{:.3} ms of {:.3} ms", next * 1e3, first * 1e3);
}
