//! Somebody else writes the same objects all the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tessera_simcluster::api::{Fault, RequestInfo};
use tokio::time::Instant;

use crate::rig::Rig;

const STORM: Duration = Duration::from_secs(6);

/// In a storm that long a claim that is written again after 50 ms, 100 ms and so on up to 2 s is written nine times. Writing
/// as fast as the answers come would be hundreds.
const MOST_PER_CLAIM: usize = 10;

fn is_claim_write(request: &RequestInfo) -> bool {
    request.resource == "resourceclaims" && request.verb == "patch"
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
    rig.requested(names.len(), is_claim_write).await;
    tokio::time::sleep(STORM).await;
    let writes = rig.requests(is_claim_write).len();
    assert!(writes >= 2 * names.len(), "{writes} writes: nobody tries again");
    assert!(writes <= MOST_PER_CLAIM * names.len(), "{writes} writes for {} claims", names.len());
    storm.store(false, Ordering::Relaxed);
    let calm = Instant::now();
    rig.bound(&names).await;
    assert!(calm.elapsed() < Duration::from_secs(15), "{:?} after the storm", calm.elapsed());
    for name in &names {
        assert_eq!(rig.shares_of(name).await, 1, "{name}");
    }
    rig.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_allocation_that_nobody_needs_is_taken_back_after_the_storm_and_not_a_thousand_times_during_it() {
    let rig = Rig::with_nodes(&[1]).await;
    let _controller = rig.controller("a", false);
    rig.decide(|_| Fault::None);
    // Nobody binds the pod: no scheduler runs on this node's name.
    rig.unbindable("orphan", "16Gi").await;
    let storm = storm(&rig);
    let before = rig.requests(is_claim_write).len();
    rig.delete_now("orphan").await;
    rig.requested(before + 1, is_claim_write).await;
    tokio::time::sleep(STORM).await;
    let writes = rig.requests(is_claim_write).len() - before;
    assert!((2..=MOST_PER_CLAIM).contains(&writes), "{writes} writes for one claim");
    storm.store(false, Ordering::Relaxed);
    rig.released("orphan").await;
    rig.finish().await;
}
