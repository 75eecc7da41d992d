//! The places at which crash tests kill or hold the driver: see the crate `tessera-fault-points`.
//! Without the feature of that name there is nothing here.

/// Every point, in the order in which a claim comes by them. Those of steps say what has just been
/// done.
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
        "unprepare-asked",
        "unprepare-claim-spec",
        "unprepare-ledger",
        "unprepare-grant",
        "unprepare-undone",
        "unprepare-mps-given-up",
        "unprepare-forgotten",
    ]);

/// The caller, a thread that may block, has come to the point.
#[cfg(feature = "fault-points")]
pub(crate) fn point(name: &'static str) {
    POINTS.reach(name);
}

/// The caller, a thread that may block, has come to the point.
#[cfg(not(feature = "fault-points"))]
pub(crate) fn point(_: &'static str) {}

/// The caller, a task, has come to the point.
#[cfg(feature = "fault-points")]
pub(crate) async fn point_async(name: &'static str) {
    POINTS.reach_async(name).await;
}

/// The caller, a task, has come to the point.
#[cfg(not(feature = "fault-points"))]
#[expect(clippy::unused_async, reason = "with the feature it waits")]
pub(crate) async fn point_async(_: &'static str) {}
