//! Fault points, at which crash tests kill or hold the driver: see `tessera_runtime::fault_points`.
//! Without the feature `fault-points` they do nothing.

/// All points, in the order in which a claim reaches them. The name of a point says what has just
/// been done.
#[cfg(feature = "fault-points")]
pub static POINTS: tessera_runtime::fault_points::FaultPoints =
    tessera_runtime::fault_points::FaultPoints::new(&[
        "prepare-asked",
        "prepare-claim-read",
        "prepare-started",
        "prepare-mps-wanted",
        "prepare-base-spec",
        "prepare-grant",
        "prepare-ledger-mounted",
        "prepare-ledger",
        "prepare-claim-spec",
        "prepare-completed",
        "resize-recorded",
        "resize-granted",
        "unprepare-asked",
        "unprepare-claim-spec",
        "unprepare-ledger",
        "unprepare-grant",
        "unprepare-mps-released",
        "unprepare-undone",
        "unprepare-forgotten",
    ]);

/// Reaches a point from a thread that may block.
#[cfg(feature = "fault-points")]
pub(crate) fn point(name: &'static str) {
    POINTS.reach(name);
}

/// Reaches a point from a thread that may block.
#[cfg(not(feature = "fault-points"))]
pub(crate) fn point(_: &'static str) {}

/// Reaches a point from a task.
#[cfg(feature = "fault-points")]
pub(crate) async fn point_async(name: &'static str) {
    POINTS.reach_async(name).await;
}

/// Reaches a point from a task.
#[cfg(not(feature = "fault-points"))]
#[expect(clippy::unused_async, reason = "waits if the feature is enabled")]
pub(crate) async fn point_async(_: &'static str) {}
