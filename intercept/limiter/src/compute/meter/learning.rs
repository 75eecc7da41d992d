//! Learning: what the events of a launch show of its GPU time, and of that of its kernel.

use crate::compute::decision::ComputeView;
use crate::compute::sample::{During, Measured, Sample, own_part};
use crate::compute::spans::Span;

/// A sample that may contain a turn of another context counts as at most this many times the
/// kernel's typical time.
const MOST_TYPICAL: u64 = 2;

/// Result of a sample: GPU time of a span's launch, and whether it applies to the launches that the
/// span stands for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Settled {
    /// Nothing: they stay charged as estimated.
    Unknown,
    /// The usual part and the excess of its GPU time, and whether they say something of the other
    /// launches.
    Sample { parts: (u64, u64), is_of_all: bool },
    /// The least and the most GPU time of its launch.
    Bounds(u64, u64),
}

impl Settled {
    /// Returns the GPU time of its launch; `estimated_ns` if it shows nothing.
    pub(super) fn own_ns(self, estimated_ns: u64) -> u64 {
        match self {
            Self::Unknown => estimated_ns,
            Self::Sample { parts: (usual, excess), .. } => usual.saturating_add(excess),
            Self::Bounds(least, most) => estimated_ns.clamp(least, most),
        }
    }

    /// Returns the part of it that is more than usual.
    pub(super) const fn excess_ns(self) -> u64 {
        match self {
            Self::Sample { parts: (_, excess), .. } => excess,
            Self::Unknown | Self::Bounds(..) => 0,
        }
    }
}

/// Learns the GPU time of a launch from a sample.
pub(super) fn learn(
    (span, measured, sample): (Span, Measured, Sample),
    during: During,
    view: &ComputeView<'_>,
) -> Settled {
    let (key, estimates) = (span.launch.key, &view.budget.estimates);
    let slice_ns = view.slice_ns.max(1);
    let own = |wall: u64| own_part(estimates, key, Measured { wall, ..measured }, during, slice_ns);
    // A long launch contains turns of others, whose number `own_part` derives. A short one contains
    // none, or one of any length.
    let is_alone = during.contention.is_negligible() && during.only_siblings && !view.has_siblings;
    let typical = estimates.typical(key).filter(|mean| !is_alone && *mean < slice_ns / 2);
    match sample {
        Sample::Long(wall) | Sample::Idle(wall)
            if typical.is_some_and(|typical| wall > typical + typical / 2) =>
        {
            estimates.raise(key);
            Settled::Unknown
        }
        Sample::Exact(wall) | Sample::Long(wall) => {
            let Some(all) = own(wall) else { return Settled::Unknown };
            let parts = estimates.usual_part(key, all);
            let most = typical.map_or(u64::MAX, |typical| typical * MOST_TYPICAL);
            estimates.learn(key, all.min(most));
            // Which launch of a lease is measured is random, with a probability in proportion to
            // its estimate: it stands for the others.
            let is_of_all = during.contention.is_negligible() && typical.is_none();
            Settled::Sample { parts, is_of_all }
        }
        Sample::Idle(wall) => {
            let Some(all) = own(wall) else { return Settled::Unknown };
            let parts = estimates.usual_part(key, all);
            estimates.learn(key, all);
            Settled::Sample { parts, is_of_all: false }
        }
        Sample::Within(least, most) => {
            let least = if typical.is_some() { 0 } else { least };
            let (Some(least), Some(most)) = (own(least), own(most)) else {
                return Settled::Unknown;
            };
            estimates.bound(key, least, most);
            Settled::Bounds(least, most.max(least))
        }
    }
}
