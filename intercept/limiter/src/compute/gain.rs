//! Correction of charged GPU time by what NVML reports.
//!
//! Events measure launches one by one. They do not see streams that run at the same time, copies,
//! and kernels that the GPU launches itself. NVML reports for each process the part of the time in
//! which the GPU had work of it. The quotient is the gain: GPU time is charged to the bucket times
//! the gain (docs/adr/0110-host-measurement.md).

use core::sync::atomic::Ordering;

use tessera_intercept_abi::PublishedPage;

use crate::compute::bucket::BURST_GPU_NS;
use crate::compute::meter::UNMEASURED_DONE_BY_NS;
use crate::compute::proportion::in_proportion;
use crate::compute::published::age_ms;
use crate::compute::rate::Rate;

/// The GPU time that NVML reports as a part of the charged GPU time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gain(u16);

impl Default for Gain {
    fn default() -> Self {
        Self::ONE
    }
}

impl Gain {
    /// No correction.
    pub const ONE: Self = Self(1 << 10);
    /// The least: eight streams whose kernels all run at the same time. GPUs have eight hardware
    /// channels by default.
    pub const LEAST: Self = Self(Self::ONE.0 / 8);
    /// The most.
    pub const MOST: Self = Self(Self::ONE.0 * 8);
    /// The age at which a published gain expires.
    pub const STALE_MS: u32 = 5_000;

    /// Returns the gain of a quotient, within [`Gain::LEAST`] and [`Gain::MOST`]. [`Gain::ONE`] if
    /// nothing was charged.
    #[must_use]
    pub fn of(used_ns: u64, charged_ns: u64) -> Self {
        if charged_ns == 0 {
            return Self::ONE;
        }
        let gain = u128::from(used_ns) * u128::from(Self::ONE.0) / u128::from(charged_ns);
        Self(u16::try_from(gain).unwrap_or(u16::MAX)).clamp(Self::LEAST, Self::MOST)
    }

    /// Returns the gain as a quotient.
    #[must_use]
    pub fn as_quotient(self) -> f64 {
        f64::from(self.0) / f64::from(Self::ONE.0)
    }

    /// Returns GPU time that was charged, corrected.
    #[must_use]
    pub const fn correct(self, gpu_ns: u64) -> u64 {
        if self.0 == Self::ONE.0 {
            return gpu_ns;
        }
        gpu_ns.saturating_mul(self.0 as u64) / Self::ONE.0 as u64
    }

    /// Returns the charged GPU time that is this much when it is corrected.
    const fn uncorrect(self, gpu_ns: u64) -> u64 {
        gpu_ns.saturating_mul(Self::ONE.0 as u64) / self.0 as u64
    }

    /// Returns true if the charged GPU time differs by more than a quarter of it.
    #[must_use]
    pub const fn is_large(self) -> bool {
        self.0.abs_diff(Self::ONE.0) > Self::ONE.0 / 4
    }

    /// Returns the word of the page that publishes it, with the utilization that NVML reports in
    /// percent.
    #[must_use]
    pub const fn word(self, percent: u8, now: u64) -> u64 {
        self.0 as u64 | (percent as u64) << 16 | ((now / 1_000_000) as u32 as u64) << 32
    }

    /// Returns the utilization in percent of the word of a page. `None` if none was published or if
    /// it has expired.
    #[must_use]
    pub const fn utilization_of(word: u64, now: u64) -> Option<u8> {
        let is_fresh = word & 0xffff != 0 && age_ms((word >> 32) as u32, now) <= Self::STALE_MS;
        if is_fresh { Some((word >> 16) as u8) } else { None }
    }

    /// Returns the published gain: [`Gain::ONE`] if none was published or if it has expired.
    #[must_use]
    pub fn read(page: &PublishedPage, now: u64) -> Self {
        Self::of_word(page.gain.load(Ordering::Relaxed), now)
    }

    /// Returns the gain of a page's word, as [`Gain::read`].
    #[must_use]
    pub fn of_word(word: u64, now: u64) -> Self {
        let gain = Self((word & 0xffff) as u16);
        let is_fresh = gain.0 != 0 && age_ms((word >> 32) as u32, now) <= Self::STALE_MS;
        if is_fresh { gain.clamp(Self::LEAST, Self::MOST) } else { Self::ONE }
    }
}

/// Use by one share in one interval, by NVML and by its ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interval {
    /// Length in ns.
    pub wall_ns: u64,
    /// Age of NVML's last sample at the end of it, in ns: `used_ns` lacks what ran since. `None` if
    /// it is not known: then it is at most the interval.
    pub age_ns: Option<u64>,
    /// GPU-ns that the ledger's processes were charged.
    pub charged_ns: u64,
    /// Time with work in ns of the process that had the most of it.
    pub busy_ns: u64,
    /// GPU-ns charged for work that is not done at the end of it.
    pub outstanding_ns: u64,
    /// GPU-ns that NVML reports for them.
    pub used_ns: u64,
    /// Processes for which NVML reports a use above 0: each is a whole number of percent.
    pub processes: u32,
    /// True if processes of other containers used the GPU.
    pub is_contended: bool,
    /// True if an unmeasured kernel runs at the end of it: it is charged when it is done.
    pub is_late: bool,
    /// Rate of the container's token bucket; [`Rate::FULL`] if launches need no tokens.
    pub rate: Rate,
}

impl Interval {
    /// Returns [`is_late`](Self::is_late) of a process with this
    /// [`done_by_ns`](tessera_intercept_abi::ComputeSlot::done_by_ns).
    #[must_use]
    pub const fn is_late(done_by_ns: u64, now: u64) -> bool {
        done_by_ns.saturating_sub(now) > UNMEASURED_DONE_BY_NS / 2
    }
}

/// Estimates the gain of one share from intervals of about a second.
///
/// Charged time and used time are of the same work, but not of the same moment: work is charged
/// before it runs, and NVML reports it some time after. So the GPU time that NVML has reported by
/// now must lie between what was done at NVML's last sample and what is charged by now. Only the
/// excess over these two bounds counts, and of it, what is more than the error of NVML. What was
/// charged since the last sample is not known: at most what the token bucket allows in that time,
/// and at most the even part of the time with work.
///
/// NVML reports a whole number of percent for each process. A process that always uses the same may
/// always be reported half a percent too low or too high, so that much does not count. But others
/// pay for a container that is charged too little: while they have work, only random errors are
/// left out where NVML reports more than what was charged, and it cannot have reported what was
/// charged since the last sample (docs/adr/0148-errors-beside-others.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GainEstimator {
    /// Decaying sums, GPU-ns.
    charged_ns: u64,
    excess_ns: i64,
    /// Error of NVML if it is the same in all readings.
    rounded_ns: u64,
    /// Sum of the squares of random errors, GPU-ns^2.
    squares: u64,
    /// Charged in the last interval.
    last_charged_ns: u64,
    /// Used minus charged since the first interval, less the excess until now.
    ahead_ns: i64,
    /// Charged for work that was not done at the end of the interval before.
    outstanding_ns: u64,
    /// The most of that, decaying: the sums are of a few kernels if these are as long.
    longest_ns: u64,
    /// Used while kernels of unknown length ran, decaying: it may be charged later.
    late_ns: u64,
    /// True if other containers had work in the last interval.
    is_contended: bool,
}

impl Default for GainEstimator {
    fn default() -> Self {
        Self {
            charged_ns: Self::BEFORE_NS,
            excess_ns: 0,
            rounded_ns: 0,
            squares: 0,
            last_charged_ns: 0,
            ahead_ns: 0,
            outstanding_ns: 0,
            longest_ns: 0,
            late_ns: 0,
            is_contended: false,
        }
    }
}

impl GainEstimator {
    /// Sums lose this part in each interval: half of a sum is of the last four.
    const DECAY: u64 = 6;

    /// GPU time that is taken to be charged as it was used before the first interval: a reading of
    /// a program that has just begun changes little.
    const BEFORE_NS: u64 = 500_000_000;

    /// The part of its use that a container is charged more beside others: what is left of the
    /// errors is as often in its favour as not, and others pay for the former. Without it, they
    /// kept 96.4 % of what a cap left them at worst, in simulation.
    const MARGIN: u64 = 256;

    /// The most GPU time that is taken to be charged later. A program that always runs new kernels
    /// is corrected after that.
    const MOST_LATE_NS: u64 = 8_000_000_000;

    /// Adds an interval.
    pub fn add(&mut self, interval: Interval) {
        let Interval { wall_ns, charged_ns, outstanding_ns, used_ns, .. } = interval;
        let decayed = |sum: u64| sum - sum / Self::DECAY;
        self.late_ns = if interval.is_late {
            self.late_ns.saturating_add(used_ns).min(Self::MOST_LATE_NS)
        } else {
            decayed(self.late_ns)
        };
        let (least_ns, most_ns) = self.bounds(&interval);
        (self.outstanding_ns, self.is_contended) = (outstanding_ns, interval.is_contended);
        self.last_charged_ns = charged_ns;
        let ahead_ns =
            self.ahead_ns.saturating_add_unsigned(used_ns).saturating_sub_unsigned(charged_ns);
        self.ahead_ns = ahead_ns.clamp(least_ns, most_ns);
        let excess_ns = ahead_ns - self.ahead_ns;
        let (error_ns, processes) = (wall_ns / 200, u64::from(interval.processes.max(1)));
        self.charged_ns = decayed(self.charged_ns).saturating_add(charged_ns);
        self.rounded_ns = decayed(self.rounded_ns).saturating_add(error_ns * processes);
        let squares = error_ns.saturating_mul(error_ns).saturating_mul(processes);
        self.squares = decayed(self.squares).saturating_add(squares);
        self.longest_ns = decayed(self.longest_ns).max(outstanding_ns);
        self.excess_ns =
            (self.excess_ns - self.excess_ns / Self::DECAY as i64).saturating_add(excess_ns);
    }

    /// Returns the least and the most that can have been used more than charged, in GPU-ns, both at
    /// most 0 but for kernels of unknown length.
    fn bounds(&self, interval: &Interval) -> (i64, i64) {
        let Interval { wall_ns, age_ns, charged_ns, outstanding_ns, .. } = *interval;
        let age_ns = age_ns.map(|age_ns| age_ns.min(wall_ns));
        // Single long kernels are not even parts of intervals.
        let steady_ns = charged_ns.min(self.last_charged_ns);
        let even_ns = |age_ns| in_proportion(steady_ns, age_ns, wall_ns.max(1));
        let known_age_ns = age_ns.filter(|_| interval.is_contended);
        let least_unseen_ns = known_age_ns.map_or(0, |age_ns| even_ns(age_ns).min(age_ns));
        let most_unseen_ns = age_ns.map_or(charged_ns, |age_ns| {
            let allowed_ns = interval.rate.gpu_ns(age_ns).saturating_add(BURST_GPU_NS);
            // All of the work may have begun after the sample.
            let spread_ns = match interval.busy_ns.min(wall_ns) {
                busy_ns if busy_ns > age_ns => in_proportion(charged_ns, age_ns, busy_ns),
                _ => charged_ns,
            };
            spread_ns.min(self.gain().uncorrect(allowed_ns)).max(least_unseen_ns)
        });
        let undone_ns = self.outstanding_ns.max(outstanding_ns);
        (
            0_i64.saturating_sub_unsigned(most_unseen_ns).saturating_sub_unsigned(undone_ns),
            0_i64.saturating_add_unsigned(self.late_ns).saturating_sub_unsigned(least_unseen_ns),
        )
    }

    /// Returns the gain.
    #[must_use]
    pub fn gain(&self) -> Gain {
        let excess_ns = self.excess_ns.unsigned_abs();
        let error_ns = match self.excess_ns {
            // Work is taken as even, but single kernels end before or after the sample.
            0.. if self.is_contended => self.squares.isqrt().saturating_add(self.longest_ns / 2),
            _ => self.rounded_ns.saturating_add(self.longest_ns),
        };
        let certain_ns = excess_ns.saturating_sub(error_ns);
        let used_ns = match self.excess_ns {
            0.. => self.charged_ns.saturating_add(certain_ns),
            _ => self.charged_ns.saturating_sub(certain_ns),
        };
        let margin_ns = if self.is_contended { used_ns / Self::MARGIN } else { 0 };
        Gain::of(used_ns.saturating_add(margin_ns), self.charged_ns)
    }
}
