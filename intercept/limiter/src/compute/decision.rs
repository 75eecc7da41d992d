//! Request of a launch, and the answer to it.

use crate::compute::estimates::Key;
use crate::compute::launch_budget::LaunchBudget;
use crate::compute::{ComputePage, ComputeSlot, Entitlement, Gain, Published, Rate};
use tessera_intercept_abi::ComputePolicy;

/// Number of an event, below [`MARKERS`](crate::compute::MARKERS). The caller knows the `CUevent`
/// of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Marker(pub u16);

/// Queries of events.
pub trait EventTimer {
    /// Returns true if events may be queried now. Otherwise no launch is settled.
    fn may_ask(&self) -> bool {
        true
    }

    /// Returns true if the GPU has passed the event, or if that cannot be queried.
    fn query_done(&mut self, marker: Marker) -> bool;

    /// Returns the GPU's time from one passed event to another of the same context, in ns. `None`
    /// if it cannot be queried.
    fn elapsed_ns(&mut self, from: Marker, to: Marker) -> Option<i64>;
}

/// State of a GPU and of a container on it, as one process sees it.
#[derive(Debug, Clone, Copy)]
pub struct ComputeView<'a> {
    /// Budget of the process.
    pub budget: &'a LaunchBudget,
    /// Words of the container.
    pub page: &'a ComputePage,
    /// Words of the process.
    pub slot: &'a ComputeSlot,
    /// [`running_of`](crate::compute::running_of) the container's other processes.
    pub siblings: u64,
    /// True if one of them [had work lately](ComputeSlot::was_busy).
    pub has_siblings: bool,
    /// Values that the host publishes.
    pub published: Option<Published>,
    /// Correction by the host of charged GPU time.
    pub gain: Gain,
    /// Entitlement by the container's grants.
    pub entitlement: Entitlement,
    /// Time in ns that a context keeps the GPU while others have work.
    pub slice_ns: u64,
}

/// A launch that asks for admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// The kernel or graph.
    pub key: Key,
    /// The context: events of two contexts cannot be compared.
    pub context: usize,
    /// The stream, as a number.
    pub stream: usize,
}

/// Times of a request in monotonic ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchTime {
    /// Time of its first request: the time that it has waited is its own, whatever other threads
    /// launch meanwhile.
    pub since: u64,
    /// Time of this request.
    pub now: u64,
}

/// Answer to a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchDecision {
    /// Launch now.
    Go(LaunchPlan),
    /// Wait, then ask again.
    Wait(WaitUntil),
}

/// Admitted launch: the events to record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchPlan {
    /// Events of a launch that is measured. If the launch fails:
    /// [`Meter::failed`](crate::compute::Meter::failed).
    pub pair: Option<EventPair>,
    /// Number of the measured launch; 0: not measured.
    pub(super) serial: u64,
}

/// Events of a measured launch, recorded in its stream in this order; the launch comes before the
/// last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventPair {
    /// Shows, with the next, the time that an empty pair of events takes. Most pairs have none.
    pub calibration: Option<Marker>,
    /// Recorded right before the launch.
    pub before: Marker,
    /// Recorded right after the launch.
    pub behind: Marker,
}

/// Parameters of a wait: on the futex `page.wake` while it is `wake`, no longer than `until_ns`.
/// Then ask again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitUntil {
    /// Monotonic ns.
    pub until_ns: u64,
    /// Current value of the futex.
    pub wake: u32,
}

impl ComputeView<'_> {
    /// Returns true if launches are held back now, or, under `Balance`, as soon as other
    /// containers have work: queued launches cannot be undone then.
    pub(super) fn may_hold(&self) -> bool {
        self.entitlement.with(self.published).policy == ComputePolicy::Balance
            || self.rate().is_some()
    }

    /// Returns true if other containers have work, as far as the host has published it.
    pub(super) fn has_others(&self) -> bool {
        self.published.is_some_and(|published| !published.others.is_negligible())
    }

    /// Returns the rate of the container's bucket; `None` if launches need no tokens.
    pub(super) fn rate(&self) -> Option<Rate> {
        self.entitlement.rate(self.published)
    }

    /// Returns charged GPU time, corrected by the measurement of the host.
    pub(super) fn corrected(&self, gpu_ns: u64) -> u64 {
        self.gain.correct(gpu_ns)
    }
}
