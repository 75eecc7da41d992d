//! Conflicting writes to the same objects by other clients.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tessera_simcluster::api::{Fault, RequestInfo};

use crate::harness::FaultHarness;

/// Number of writes of each claim before the conflicts end.
const WRITES: usize = 7;

/// Minimum duration of these writes. The first retry is immediate, then the backoff is 50 ms,
/// doubled each time.
const PAUSES: Duration = Duration::from_millis(50 + 100 + 200 + 400 + 800);

fn is_claim_write(request: &RequestInfo) -> bool {
    request.resource == "resourceclaims" && request.verb == "patch"
}

/// Waits until the claim was written that often after its first `before` writes; returns the
/// duration.
async fn wait_written(harness: &FaultHarness, claim: &str, before: usize) -> Duration {
    let of_claim = |request: &RequestInfo| is_claim_write(request) && request.name == claim;
    harness.wait_requests(before + WRITES, of_claim).await;
    let writes = harness.requests(of_claim);
    writes[before + WRITES - 1].0 - writes[before].0
}

/// Makes every claim write of the controller conflict until the returned flag is cleared.
fn force_conflicts(harness: &FaultHarness) -> Arc<AtomicBool> {
    let active = Arc::new(AtomicBool::new(true));
    let is_active = active.clone();
    harness.set_faults(move |request| {
        match is_claim_write(request) && is_active.load(Ordering::Relaxed) {
            true => Fault::ConflictingWrite,
            false => Fault::None,
        }
    });
    active
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backs_off_during_conflicts_and_binds_all_pods() {
    let harness = FaultHarness::with_nodes(&[2, 2]).await;
    let conflicts = force_conflicts(&harness);
    let _controller = harness.controller("a", false);
    let names: Vec<String> = (0..20).map(|number| format!("pod-{number}")).collect();
    for name in &names {
        harness.pod(name, "16Gi").await;
    }
    for name in &names {
        let took = wait_written(&harness, name, 0).await;
        assert!(took >= PAUSES, "{WRITES} writes of {name} in {took:?}");
    }
    conflicts.store(false, Ordering::Relaxed);
    harness.wait_bound(&names).await;
    for name in &names {
        assert_eq!(harness.shares_of(name).await, 1, "{name}");
    }
    harness.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backs_off_release_during_conflicts() {
    let harness = FaultHarness::with_nodes(&[1]).await;
    let _controller = harness.controller("a", false);
    harness.set_faults(|_| Fault::None);
    // No scheduler has the pod's `schedulerName`.
    harness.unbindable("orphan", "16Gi").await;
    let conflicts = force_conflicts(&harness);
    let before = harness.requests(is_claim_write).len();
    harness.delete_now("orphan").await;
    let took = wait_written(&harness, "orphan", before).await;
    assert!(took >= PAUSES, "{WRITES} writes in {took:?}");
    conflicts.store(false, Ordering::Relaxed);
    harness.wait_released("orphan").await;
    harness.finish().await;
}
