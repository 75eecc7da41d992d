//! Cost of selectors that no pod waits for. A program of its own with one test: CPU time is that
//! of the whole process, since selectors are compiled on threads of their own.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tessera_allocator::selector::CompiledSelector;
use tessera_index::Index;

fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap()
}

/// A legal expression of nearly 10 KiB, the most that the API server takes.
fn expression(number: usize) -> String {
    format!("[{}{number}].size() > 0", "1,".repeat(5000))
}

fn claim(driver: &str) -> Arc<ResourceClaim> {
    let selectors: Vec<Value> = (0..6)
        .map(|number| {
            json!({"cel": {"expression": format!("device.driver == '{driver}' && {}", expression(number))}})
        })
        .collect();
    let claim = json!({
        "metadata": {"name": "c", "namespace": "default", "uid": "uid-c", "resourceVersion": "1"},
        "spec": {"devices": {"requests": [{
            "name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev", "selectors": selectors},
        }]}},
    });
    Arc::new(serde_json::from_value(claim).unwrap())
}

#[test]
fn claim_that_no_pod_waits_for_is_not_compiled() {
    let start = cpu_time();
    CompiledSelector::cached(&expression(0)).unwrap();
    let one_selector = cpu_time() - start;
    let claims = [claim("gpu.tessera.dev"), claim("nic.example.com")];
    let mut index = Index::default();
    let start = cpu_time();
    for claim in claims {
        index.apply_claim(&claim).unwrap();
    }
    index.overcommitted();
    index.unneeded();
    assert!(index.work().pending.is_empty());
    let applied = cpu_time() - start;
    assert!(
        applied < one_selector,
        "12 selectors applied: {applied:?}, one compiled: {one_selector:?}"
    );
}
