//! Fault points: the places at which crash tests kill or hold the controller (see
//! `tessera_runtime::fault_points`). Empty without the feature `fault-points`.

/// All points, in the order in which the writes of a claim and the evictions for a pod reach them.
#[cfg(feature = "fault-points")]
pub static POINTS: tessera_runtime::fault_points::FaultPoints =
    tessera_runtime::fault_points::FaultPoints::new(&[
        "allocation-decided",
        "finalizer-written",
        "allocation-written",
        "resize-decided",
        "resize-written",
        "release-decided",
        "release-written",
        "barrier-decided",
        "barrier-written",
        "evictions-decided",
        "eviction-written",
    ]);

/// Marks that the caller has reached the point, and waits there if a test holds it.
#[cfg(feature = "fault-points")]
pub(crate) async fn point_async(name: &'static str) {
    POINTS.reach_async(name).await;
}

/// Marks that the caller has reached the point, and waits there if a test holds it.
#[cfg(not(feature = "fault-points"))]
#[expect(clippy::unused_async, reason = "with the feature it waits")]
pub(crate) async fn point_async(_: &'static str) {}
