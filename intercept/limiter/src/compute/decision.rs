//! What a launch asks, and what it is answered.

use tessera_intercept_abi::ComputePolicy;

use crate::compute::estimates::Key;
use crate::compute::till::Till;
use crate::compute::{ComputePage, ComputeSlot, Gain, Published, Rate};

/// Number of an event: below [`MARKERS`](crate::compute::MARKERS). Which `CUevent` that is, the
/// caller knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Marker(pub u16);

/// What can be asked of events.
pub trait Timer {
    /// Whether events may be asked now. `false`: nothing is settled.
    fn may_ask(&self) -> bool {
        true
    }

    /// Whether the GPU has passed it. Where that cannot be known, `true`.
    fn is_done(&mut self, marker: Marker) -> bool;

    /// The GPU's time from one passed event to another of the same context, in ns. `None` where
    /// that cannot be known.
    fn elapsed_ns(&mut self, from: Marker, to: Marker) -> Option<i64>;
}

/// Where a process's launches count, and what goes on around it.
#[derive(Debug, Clone, Copy)]
pub struct Surroundings<'a> {
    /// Where the process's launches pay.
    pub till: &'a Till,
    /// The container's part.
    pub page: &'a ComputePage,
    /// The process's own part.
    pub slot: &'a ComputeSlot,
    /// [`running_of`](crate::compute::running_of) the container's other processes.
    pub siblings: u64,
    /// Whether one of them [had work lately](ComputeSlot::was_busy).
    pub has_siblings: bool,
    /// What the host says.
    pub published: Option<Published>,
    /// The host's correction of what is charged.
    pub gain: Gain,
    /// The grant's.
    pub policy: ComputePolicy,
    /// The grant's cores.
    pub share: Rate,
    /// How long a context keeps the GPU while others have work, ns.
    pub slice_ns: u64,
}

/// A launch that asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// The kernel or graph.
    pub key: Key,
    /// The context: events of two contexts cannot be compared.
    pub context: usize,
    /// The stream, as a number.
    pub stream: usize,
}

/// When a launch asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// The first time, monotonic ns: how long it is kept waiting is its own affair, whatever other
    /// threads launch meanwhile.
    pub since: u64,
    /// This time.
    pub now: u64,
}

/// Whether a launch may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Now.
    Go(Plan),
    /// Not yet.
    Wait(Waiting),
}

/// How a launch is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// The events of a launch that is measured. If it fails:
    /// [`Meter::failed`](crate::compute::Meter::failed).
    pub pair: Option<Pair>,
    /// Which measured launch it is; 0: none.
    pub(super) serial: u64,
}

/// The events of a measured launch, recorded in its stream in this order; the launch comes before
/// the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// Shows, with the next, how much time an empty pair of events takes; most pairs have none.
    pub calibration: Option<Marker>,
    /// Recorded right before the launch.
    pub before: Marker,
    /// Recorded right behind the launch.
    pub behind: Marker,
}

/// How to wait: on the futex `page.wake` as long as it is `wake`, no longer than until then. Then
/// ask again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waiting {
    /// Monotonic ns.
    pub until_ns: u64,
    /// What the futex is now.
    pub wake: u32,
}

impl Surroundings<'_> {
    /// Whether launches are held back, now or, with `Balance`, when others come back: what is
    /// queued then cannot be taken back.
    pub(super) fn may_hold(&self) -> bool {
        self.policy == ComputePolicy::Balance || self.rate().is_some()
    }

    /// How fast tokens come in; `None` where none are needed.
    pub(super) fn rate(&self) -> Option<Rate> {
        rate_of(self.policy, self.share, self.published)
    }

    /// Returns GPU time that was charged, corrected by what the host measured.
    pub(super) fn corrected(&self, gpu_ns: u64) -> u64 {
        self.gain.correct(gpu_ns)
    }
}

/// How fast a container pays; `None` where it need not.
#[must_use]
pub fn rate_of(policy: ComputePolicy, share: Rate, published: Option<Published>) -> Option<Rate> {
    let rate = match policy {
        ComputePolicy::None => return None,
        ComputePolicy::Fixed => share,
        ComputePolicy::Balance => published.map_or(share, |published| published.rate.max(share)),
    };
    (rate < Rate::FULL).then_some(rate)
}
