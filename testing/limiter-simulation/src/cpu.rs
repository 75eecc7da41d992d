//! CPU time of the programs: what a submission takes, and what takes the CPU away from a thread.

use crate::random::Random;
use crate::{MS, US};

/// CPU time of submissions, and how threads are preempted.
#[derive(Debug, Clone, Copy)]
pub struct CpuSpec {
    /// Least and most time of a launch in ns.
    pub launch: (u64, u64),
    /// Least and most time of the record of an event in ns.
    pub event: (u64, u64),
    /// Time of the return from a synchronisation in ns.
    pub sync: u64,
    /// Time of a decision of a limiter that is more than a compare-and-swap, in ns.
    pub decision: u64,
    /// One of this many pieces of work is preempted; 0: none.
    pub preempts_one_of: u64,
    /// Least and most time for which a preempted thread is off its CPU, in ns.
    pub preempted: (u64, u64),
}

impl Default for CpuSpec {
    /// Returns a busy machine: a driver's launch takes 4 us within a factor of two, and a thread
    /// loses its CPU for some milliseconds several times a second.
    fn default() -> Self {
        Self {
            launch: (3 * US, 6 * US),
            event: (US, 2 * US),
            sync: 10 * US,
            decision: 3 * US,
            preempts_one_of: 10_000,
            preempted: (MS, 8 * MS),
        }
    }
}

/// Period of a CPU limit: the kernel's default.
const PERIOD: u64 = 100 * MS;

/// The CPU time of a container under a CPU limit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quota {
    /// CPU time in each period.
    limit: u64,
    period: u64,
    used: u64,
}

impl Quota {
    /// Returns the quota of a limit in percent of a CPU.
    pub(crate) fn of(percent: u32) -> Self {
        Self { limit: PERIOD / 100 * u64::from(percent), period: 0, used: 0 }
    }

    /// Returns when work that begins at `now` ends: at the end of a used-up quota, all threads of
    /// the container stop until the next period.
    fn spend(&mut self, now: u64, work: u64) -> u64 {
        let mut now = now;
        let mut left = work;
        loop {
            if now / PERIOD != self.period {
                (self.period, self.used) = (now / PERIOD, 0);
            }
            let may = left.min(self.limit.saturating_sub(self.used));
            self.used += may;
            left -= may;
            now += may;
            if left == 0 {
                return now;
            }
            now = (self.period + 1) * PERIOD;
        }
    }
}

impl CpuSpec {
    /// Returns when a launch that begins at `now` is submitted.
    pub(crate) fn launch(&self, quota: Option<&mut Quota>, now: u64, random: &mut Random) -> u64 {
        self.work(quota, now, random.between(self.launch.0, self.launch.1), random)
    }

    /// Returns when an event whose record begins at `now` is submitted.
    pub(crate) fn event(&self, quota: Option<&mut Quota>, now: u64, random: &mut Random) -> u64 {
        self.work(quota, now, random.between(self.event.0, self.event.1), random)
    }

    /// Returns when work that begins at `now` ends.
    pub(crate) fn work(
        &self,
        quota: Option<&mut Quota>,
        now: u64,
        work: u64,
        random: &mut Random,
    ) -> u64 {
        let preempted = self.preempts_one_of > 0 && random.between(0, self.preempts_one_of) == 0;
        let away = if preempted { random.between(self.preempted.0, self.preempted.1) } else { 0 };
        quota.map_or(now + work, |quota| quota.spend(now, work)) + away
    }
}
