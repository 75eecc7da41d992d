//! Somebody else writes the same objects all the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tessera_simcluster::api::{Fault, RequestInfo};

use crate::rig::Rig;

/// How often each claim is written before the storm ends.
const WRITES: usize = 7;

/// The pauses between them: none, and then 50 ms, doubled each time.
const PAUSES: Duration = Duration::from_millis(50 + 100 + 200 + 400 + 800);

fn is_claim_write(request: &RequestInfo) -> bool {
    request.resource == "resourceclaims" && request.verb == "patch"
}

/// Waits until the claim was written so often, counted from `before`, and says how long that took.
async fn written(rig: &Rig, claim: &str, before: usize) -> Duration {
    let of_claim = |request: &RequestInfo| is_claim_write(request) && request.name == claim;
    rig.requested(before + WRITES, of_claim).await;
    let writes = rig.requests(of_claim);
    writes[before + WRITES - 1].0 - writes[before].0
}

/// Every write of a claim by the controller is overtaken while the storm lasts.
fn storm(rig: &Rig) -> Arc<AtomicBool> {
    let storm = Arc::new(AtomicBool::new(true));
    let blows = storm.clone();
    rig.decide(move |request| match is_claim_write(request) && blows.load(Ordering::Relaxed) {
        true => Fault::Overtake,
        false => Fault::None,
    });
    storm
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_storm_of_conflicts_is_met_with_patience_and_ends_with_every_pod_bound() {
    let rig = Rig::with_nodes(&[2, 2]).await;
    let storm = storm(&rig);
    let _controller = rig.controller("a", false);
    let names: Vec<String> = (0..20).map(|number| format!("pod-{number}")).collect();
    for name in &names {
        rig.pod(name, "16Gi").await;
    }
    for name in &names {
        let took = written(&rig, name, 0).await;
        assert!(took >= PAUSES, "{WRITES} writes of {name} in {took:?}");
    }
    storm.store(false, Ordering::Relaxed);
    rig.bound(&names).await;
    for name in &names {
        assert_eq!(rig.shares_of(name).await, 1, "{name}");
    }
    rig.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_allocation_that_nobody_needs_is_taken_back_after_the_storm_and_not_a_thousand_times_during_it()
 {
    let rig = Rig::with_nodes(&[1]).await;
    let _controller = rig.controller("a", false);
    rig.decide(|_| Fault::None);
    // Nobody binds the pod: no scheduler runs on this node's name.
    rig.unbindable("orphan", "16Gi").await;
    let storm = storm(&rig);
    let before = rig.requests(is_claim_write).len();
    rig.delete_now("orphan").await;
    let took = written(&rig, "orphan", before).await;
    assert!(took >= PAUSES, "{WRITES} writes in {took:?}");
    storm.store(false, Ordering::Relaxed);
    rig.released("orphan").await;
    rig.finish().await;
}
