//! What will happen, drawn from a seed. Pure.

use std::time::Duration;

/// What happens; each kind has to happen in every run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// An event of a watch comes late.
    LateEvent,
    /// The connection of a watch breaks.
    BrokenWatch,
    /// A watch ends with 410 in the middle.
    ExpiredWatch,
    /// A watch cannot be continued: 410 at its resumption.
    ExpiredResumption,
    /// A request is refused: 429, 500 or 503.
    Refusal,
    /// A request is served and its answer lost.
    LostAnswer,
    /// Somebody else writes a claim first.
    OvertakenClaim,
    /// Somebody else writes the Lease first.
    OvertakenLease,
    /// Somebody else writes a ResourceSlice first.
    OvertakenSlice,
    /// The API server restarts.
    Restart,
    /// The API server's clock jumps an hour.
    ServerClock,
    /// The clock of a program jumps an hour.
    ProgramClock,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::LateEvent,
        Self::BrokenWatch,
        Self::ExpiredWatch,
        Self::ExpiredResumption,
        Self::Refusal,
        Self::LostAnswer,
        Self::OvertakenClaim,
        Self::OvertakenLease,
        Self::OvertakenSlice,
        Self::Restart,
        Self::ServerClock,
        Self::ProgramClock,
    ];
}

/// A time during which something happens, or a moment at which it does (then `lasts` is how long it
/// takes to be over).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Episode {
    /// When it begins, from the start of the plan.
    pub begins: Duration,
    /// How long it lasts.
    pub lasts: Duration,
    /// What it is.
    pub what: What,
}

/// What an episode is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Events of this resource come up to so late.
    Lag {
        /// Plural name.
        resource: &'static str,
        /// At most.
        most: Duration,
    },
    /// Every `every`th write of this resource is overtaken; 1 is all of them.
    Storm {
        /// Plural name.
        resource: &'static str,
        /// One in so many.
        every: u64,
    },
    /// Requests fail and watches break, one in so many.
    Trouble {
        /// One in so many.
        every: u64,
    },
    /// The API server is away.
    Outage {
        /// Whether its watch cache knows the past when it comes back.
        keeps_cache: bool,
    },
    /// All watches break, and none can be continued.
    Forgetting,
    /// The API server's clock is wrong.
    ServerClock {
        /// Seconds.
        ahead: i64,
    },
    /// A program's clock is wrong.
    ProgramClock {
        /// Which of the programs, modulo their number.
        program: usize,
        /// Seconds.
        ahead: i64,
    },
}

const HOUR: i64 = 3600;

/// A leader gives up after ten seconds without a renewal. Neither of these alone lasts that long,
/// or the run would be about nothing else: that the leader ends then is what `e2e/tests/faults`
/// shows. The storm on the Lease outlasts an outage and a pause between two renewals (2 s), so that
/// it meets one.
const LONGEST_OUTAGE: Duration = Duration::from_millis(2300);
const LEASE_STORM: Duration = Duration::from_millis(4500);

/// The plan of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    /// What it was drawn from.
    pub seed: u64,
    /// How long it takes.
    pub length: Duration,
    /// In the order in which they begin.
    pub episodes: Vec<Episode>,
}

impl FaultPlan {
    /// Draws a plan. Every kind of episode is in every plan; what differs is order, length and
    /// strength.
    pub fn from_seed(seed: u64, length: Duration) -> Self {
        let mut draw = Draw(mix(seed));
        let every = |draw: &mut Draw| 3 + draw.below(4);
        let lag = |draw: &mut Draw| Duration::from_millis(200 + draw.below(800));
        let mut whats = vec![
            What::Lag { resource: "resourceclaims", most: lag(&mut draw) },
            What::Lag { resource: "pods", most: lag(&mut draw) },
            What::Lag { resource: "resourceslices", most: lag(&mut draw) },
            What::Storm { resource: "resourceclaims", every: 1 },
            What::Storm { resource: "resourceclaims", every: 2 + draw.below(2) },
            What::Storm { resource: "leases", every: 1 },
            What::Storm { resource: "resourceslices", every: 1 },
            What::Trouble { every: every(&mut draw) },
            What::Trouble { every: every(&mut draw) },
            What::Outage { keeps_cache: true },
            What::Outage { keeps_cache: false },
            What::Forgetting,
            What::ServerClock { ahead: HOUR },
            What::ServerClock { ahead: -HOUR },
        ];
        let first = usize::try_from(draw.below(16)).unwrap_or_default();
        for (number, ahead) in [HOUR, -HOUR, HOUR, -HOUR].into_iter().enumerate() {
            whats.push(What::ProgramClock { program: first + number, ahead });
        }
        draw.shuffle(&mut whats);
        let slot = length / u32::try_from(whats.len()).unwrap_or(1);
        let episodes = whats.into_iter().enumerate().map(|(number, what)| {
            let jitter = slot.mul_f64(0.5 * draw.fraction());
            let begins = slot * u32::try_from(number).unwrap_or_default() + jitter;
            let strength = 0.5 + 0.5 * draw.fraction();
            let lasts = match what {
                What::Storm { resource: "leases", .. } => LEASE_STORM,
                // A driver writes them every few seconds at most.
                What::Storm { resource: "resourceslices", .. } => length / 2,
                What::Outage { .. } => LONGEST_OUTAGE.min(slot * 2).mul_f64(strength),
                _ => (slot * 3).mul_f64(strength),
            };
            Episode { begins, lasts, what }
        });
        Self { seed, length, episodes: episodes.collect() }
    }

    /// The number drawn for the n-th time something happens in a stream.
    pub fn draw(&self, stream: &str, number: u64) -> u64 {
        let hash = stream.bytes().fold(mix(self.seed), |hash, byte| mix(hash ^ u64::from(byte)));
        mix(hash ^ number)
    }
}

/// SplitMix64's finalizer (Steele, Lea, Flood 2014): all that is needed is that equal seeds give
/// equal plans.
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

    /// From 0 to 1.
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
    fn a_seed_replays_and_another_one_differs() {
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
    fn no_plan_keeps_the_leader_from_its_lease_for_long_in_one_go_and_all_begin_in_time() {
        for seed in 0..200 {
            let plan = FaultPlan::from_seed(seed, LENGTH);
            assert!(plan.episodes.is_sorted_by_key(|episode| episode.begins), "{seed}");
            for episode in &plan.episodes {
                assert!(episode.begins < LENGTH, "{seed} {episode:?}");
                if let What::Outage { .. } | What::Storm { resource: "leases", .. } = episode.what {
                    assert!(episode.lasts <= LEASE_STORM, "{seed} {episode:?}");
                }
            }
        }
    }
}
