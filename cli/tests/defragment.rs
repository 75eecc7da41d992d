//! The pods to move so that a pending pod fits.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fixture;

use fixture::{Fixture, device, golden};
use serde_json::{Value, json};
use tessera_api::names::{Namespace, PodName};
use tessera_cli::args::PolicyName;
use tessera_cli::defragment::{
    DefragmentError, Defragmentation, DefragmentationResult, defragment, likely_requests,
    requests_text, text,
};
use tessera_cli::explain::PlanView;

fn try_for(fixture: &Fixture, pod: &str) -> Result<Defragmentation, DefragmentError> {
    let indexed = fixture.snapshot.indexed();
    let now = fixture.snapshot.taken_at;
    let view = PlanView::new(&fixture.snapshot, &indexed, PolicyName::settings(None), now);
    defragment(&view, &Namespace::new("team-a").unwrap(), &PodName::new(pod).unwrap())
}

fn found(fixture: &Fixture, pod: &str) -> Defragmentation {
    try_for(fixture, pod).unwrap()
}

/// Two nodes of two GPUs; all four have a share of 20 GiB.
fn fragmented() -> Fixture {
    let mut fixture = Fixture::new();
    for (mark, node) in [("aa", "node-a"), ("ab", "node-a"), ("ba", "node-b"), ("bb", "node-b")] {
        fixture.tenant(&format!("small-{mark}"), node, &device(mark), "20Gi", "10");
    }
    fixture
}

/// A request for this number of whole GPUs.
fn gpus(count: u32) -> Value {
    json!({"name": "gpu", "exactly": {"deviceClassName": "gpu.tessera.dev", "count": count}})
}

#[test]
fn share_is_moved_off_a_gpu_that_is_needed_whole() {
    let mut fixture = fragmented();
    fixture.pending("trainer", gpus(1));
    let found = found(&fixture, "trainer");
    assert_eq!(found.result, DefragmentationResult::FitsAfterMoves);
    assert_eq!(found.moves.len(), 1, "{found:?}");
    assert_eq!(found.devices, found.moves[0].devices);
    golden("defragment/one-move.txt", &text(&found));
}

#[test]
fn pods_of_higher_priority_are_moved_too() {
    let mut fixture = fragmented();
    for pod in &mut fixture.snapshot.pods {
        pod.spec.as_mut().unwrap().priority = Some(1000);
    }
    fixture.pending("trainer", gpus(2));
    let found = found(&fixture, "trainer");
    assert_eq!(found.result, DefragmentationResult::FitsAfterMoves);
    assert_eq!(found.moves.len(), 2);
    assert!(found.moves.iter().all(|one| Some(&one.from) == found.node.as_ref()));
    assert!(found.moves.iter().all(|one| one.to != one.from));
}

#[test]
fn nothing_is_moved_that_fits_nowhere_else() {
    let mut fixture = Fixture::new();
    for (mark, node) in [("aa", "node-a"), ("ab", "node-a"), ("ba", "node-b"), ("bb", "node-b")] {
        fixture.tenant(&format!("large-{mark}"), node, &device(mark), "60Gi", "10");
    }
    fixture.pending("trainer", gpus(1));
    let found = found(&fixture, "trainer");
    assert_eq!(found.result, DefragmentationResult::DoesNotFit);
    assert!(found.moves.is_empty());
    assert!(text(&found).contains("kubectl tessera explain pod trainer -n team-a"));
}

#[test]
fn pod_that_fits_needs_no_moves() {
    let mut fixture = Fixture::new();
    fixture.pending("trainer", gpus(1));
    let found = found(&fixture, "trainer");
    assert_eq!(found.result, DefragmentationResult::Fits);
    assert!(found.moves.is_empty() && found.node.is_some());
}

#[test]
fn pod_that_waits_for_nothing_is_an_error() {
    let fixture = fragmented();
    let error = try_for(&fixture, "small-aa").unwrap_err().to_string();
    assert!(error.contains("pod team-a/small-aa does not wait"), "{error}");
}

#[test]
fn the_most_frequent_requests_come_first_with_their_moves() {
    let mut fixture = fragmented();
    fixture.pending("trainer", gpus(1));
    let indexed = fixture.snapshot.indexed();
    let now = fixture.snapshot.taken_at;
    let view = PlanView::new(&fixture.snapshot, &indexed, PolicyName::settings(None), now);
    let found = likely_requests(&view, 5);
    let results: Vec<_> = found.iter().map(|one| (one.pods, one.found.result)).collect();
    assert_eq!(
        results,
        [(4, DefragmentationResult::Fits), (1, DefragmentationResult::FitsAfterMoves)]
    );
    assert_eq!(likely_requests(&view, 1).len(), 1);
    golden("defragment/requests.txt", &requests_text(&found, true));
    assert!(requests_text(&[], true).starts_with("no pod has devices"));
}
