//! The places at which crash tests kill or hold the controller: see the crate
//! `tessera-fault-points`. Without the feature of that name there is nothing here.

/// Every point, in the order in which a claim comes by them.
#[cfg(feature = "fault-points")]
pub static POINTS: tessera_runtime::fault_points::FaultPoints =
    tessera_runtime::fault_points::FaultPoints::new(&[
        "allocation-decided",
        "finalizer-written",
        "allocation-written",
        "release-decided",
        "release-written",
    ]);

/// The caller has come to the point.
#[cfg(feature = "fault-points")]
pub(crate) async fn point_async(name: &'static str) {
    POINTS.reach_async(name).await;
}

/// The caller has come to the point.
#[cfg(not(feature = "fault-points"))]
#[expect(clippy::unused_async, reason = "with the feature it waits")]
pub(crate) async fn point_async(_: &'static str) {}
