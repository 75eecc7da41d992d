//! Fault plan drawn from a seed. Pure.

use std::time::Duration;

/// FaultKind of a fault. Each kind happens in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// A watch event is delayed.
    DelayedEvent,
    /// The connection of a watch breaks.
    BrokenWatch,
    /// A running watch ends with 410.
    ExpiredWatch,
    /// A watch cannot be resumed: 410.
    ExpiredResumption,
    /// A request is refused: 429, 500 or 503.
    Refusal,
    /// A request is served and its response dropped.
    DroppedResponse,
    /// Another client writes a claim first.
    ConflictOnClaim,
    /// Another client writes the Lease first.
    ConflictOnLease,
    /// Another client writes a ResourceSlice first.
    ConflictOnSlice,
    /// The API server restarts.
    Restart,
    /// The API server's clock jumps by an hour.
    ServerClock,
    /// The clock of a program jumps by an hour.
    ProgramClock,
}

impl FaultKind {
    /// All kinds.
    pub const ALL: [Self; 12] = [
        Self::DelayedEvent,
        Self::BrokenWatch,
        Self::ExpiredWatch,
        Self::ExpiredResumption,
        Self::Refusal,
        Self::DroppedResponse,
        Self::ConflictOnClaim,
        Self::ConflictOnLease,
        Self::ConflictOnSlice,
        Self::Restart,
        Self::ServerClock,
        Self::ProgramClock,
    ];
}

/// A period of faults. For a fault at one moment, `duration` is the time until it is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Episode {
    /// Start, relative to the start of the plan.
    pub start: Duration,
    /// Duration.
    pub duration: Duration,
    /// FaultKind and parameters.
    pub kind: EpisodeKind,
}

/// FaultKind and parameters of an episode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EpisodeKind {
    /// Events of one resource are delayed.
    EventDelay {
        /// Plural name.
        resource: &'static str,
        /// Maximum delay.
        max_delay: Duration,
    },
    /// Writes of one resource conflict with another client's write.
    WriteConflicts {
        /// Plural name.
        resource: &'static str,
        /// One write in `every` conflicts; 1 means all.
        every: u64,
    },
    /// Requests fail and watches break.
    Failures {
        /// One in `every` requests fails.
        every: u64,
    },
    /// The API server is down.
    Outage {
        /// True if the watch cache survives the restart.
        keeps_cache: bool,
    },
    /// All watches break, and none can be resumed.
    WatchCacheLoss,
    /// The API server's clock is wrong.
    ServerClock {
        /// Offset in seconds.
        ahead: i64,
    },
    /// A program's clock is wrong.
    ProgramClock {
        /// Index of the program, modulo their number.
        program: usize,
        /// Offset in seconds.
        ahead: i64,
    },
}

const HOUR: i64 = 3600;

/// A leader steps down after ten seconds without a renewal.
///
/// Both of these are shorter, or the run would test only that; `e2e/tests/faults` tests it on
/// purpose. The conflicts on the Lease last longer than an outage and the pause between two
/// renewals (2 s), so that they meet a renewal.
const MAX_OUTAGE: Duration = Duration::from_millis(2300);
const LEASE_CONFLICTS: Duration = Duration::from_millis(4500);

/// The plan of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    /// Seed of the plan.
    pub seed: u64,
    /// Total length.
    pub length: Duration,
    /// Episodes in order of their start.
    pub episodes: Vec<Episode>,
}

impl FaultPlan {
    /// Draws a plan. Every plan has every kind of episode; order, length and intensity differ.
    pub fn from_seed(seed: u64, length: Duration) -> Self {
        let mut draw = Draw(mix(seed));
        let every = |draw: &mut Draw| 3 + draw.below(4);
        let lag = |draw: &mut Draw| Duration::from_millis(200 + draw.below(800));
        let mut kinds = vec![
            EpisodeKind::EventDelay { resource: "resourceclaims", max_delay: lag(&mut draw) },
            EpisodeKind::EventDelay { resource: "pods", max_delay: lag(&mut draw) },
            EpisodeKind::EventDelay { resource: "resourceslices", max_delay: lag(&mut draw) },
            EpisodeKind::WriteConflicts { resource: "resourceclaims", every: 1 },
            EpisodeKind::WriteConflicts { resource: "resourceclaims", every: 2 + draw.below(2) },
            EpisodeKind::WriteConflicts { resource: "leases", every: 1 },
            EpisodeKind::WriteConflicts { resource: "resourceslices", every: 1 },
            EpisodeKind::Failures { every: every(&mut draw) },
            EpisodeKind::Failures { every: every(&mut draw) },
            EpisodeKind::Outage { keeps_cache: true },
            EpisodeKind::Outage { keeps_cache: false },
            EpisodeKind::WatchCacheLoss,
            EpisodeKind::ServerClock { ahead: HOUR },
            EpisodeKind::ServerClock { ahead: -HOUR },
        ];
        let first = usize::try_from(draw.below(16)).unwrap_or_default();
        for (number, ahead) in [HOUR, -HOUR, HOUR, -HOUR].into_iter().enumerate() {
            kinds.push(EpisodeKind::ProgramClock { program: first + number, ahead });
        }
        draw.shuffle(&mut kinds);
        let slot = length / u32::try_from(kinds.len()).unwrap_or(1);
        let episodes = kinds.into_iter().enumerate().map(|(number, kind)| {
            let jitter = slot.mul_f64(0.5 * draw.fraction());
            let start = slot * u32::try_from(number).unwrap_or_default() + jitter;
            let strength = 0.5 + 0.5 * draw.fraction();
            let duration = match kind {
                EpisodeKind::WriteConflicts { resource: "leases", .. } => LEASE_CONFLICTS,
                // A driver writes slices every few seconds at the earliest.
                EpisodeKind::WriteConflicts { resource: "resourceslices", .. } => length / 2,
                EpisodeKind::Outage { .. } => MAX_OUTAGE.min(slot * 2).mul_f64(strength),
                _ => (slot * 3).mul_f64(strength),
            };
            Episode { start, duration, kind }
        });
        Self { seed, length, episodes: episodes.collect() }
    }

    /// Returns the draw for the n-th request or event of a stream.
    pub fn draw(&self, stream: &str, number: u64) -> u64 {
        let hash = stream.bytes().fold(mix(self.seed), |hash, byte| mix(hash ^ u64::from(byte)));
        mix(hash ^ number)
    }
}

/// SplitMix64's finalizer (Steele, Lea, Flood 2014). Only determinism is needed here.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = mix(self.0);
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns a number from 0 to 1.
    fn fraction(&mut self) -> f64 {
        f64::from(u32::try_from(self.below(1 << 20)).unwrap_or_default()) / f64::from(1 << 20)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = usize::try_from(self.below(last as u64 + 1)).unwrap_or_default();
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: Duration = Duration::from_secs(20);

    #[test]
    fn equal_seeds_give_equal_plans() {
        assert_eq!(FaultPlan::from_seed(7, LENGTH), FaultPlan::from_seed(7, LENGTH));
        assert_ne!(
            FaultPlan::from_seed(7, LENGTH).episodes,
            FaultPlan::from_seed(8, LENGTH).episodes
        );
        let (a, b) = (FaultPlan::from_seed(7, LENGTH), FaultPlan::from_seed(8, LENGTH));
        assert_eq!(a.draw("stream", 3), a.draw("stream", 3));
        assert_ne!(a.draw("stream", 3), a.draw("stream", 4));
        assert_ne!(a.draw("stream", 3), b.draw("stream", 3));
    }

    #[test]
    fn plan_never_blocks_the_lease_too_long() {
        for seed in 0..200 {
            let plan = FaultPlan::from_seed(seed, LENGTH);
            assert!(plan.episodes.is_sorted_by_key(|episode| episode.start), "{seed}");
            for episode in &plan.episodes {
                assert!(episode.start < LENGTH, "{seed} {episode:?}");
                if let EpisodeKind::Outage { .. }
                | EpisodeKind::WriteConflicts { resource: "leases", .. } = episode.kind
                {
                    assert!(episode.duration <= LEASE_CONFLICTS, "{seed} {episode:?}");
                }
            }
        }
    }
}
