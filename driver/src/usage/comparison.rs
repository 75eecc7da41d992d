//! Compares what processes were charged with what NVML reports of them.

use std::collections::BTreeMap;

/// A process: host PID and start in clock ticks since boot.
pub type ProcessId = (u32, u64);

/// GPU time that a process was charged, in ns.
#[derive(Clone, Copy, Debug)]
pub struct ProcessCharge {
    /// Since its start.
    pub gpu_ns: u64,
    /// Of it, for work that is not known to be done.
    pub outstanding_ns: u64,
    /// Time with work since its start, in ns.
    pub busy_ns: u64,
    /// Utilization of the GPU by it since the last reading, in percent.
    pub percent: u32,
}

/// Two readings of the processes of a share.
#[derive(Debug, Default)]
pub struct Compared {
    /// GPU time in ns that processes of both readings were charged in between.
    charged_ns: u64,
    /// Utilization by them in percent.
    percent: u32,
    /// Number of those with any.
    pub working: u32,
    /// Time with work in between, in ns, of the process that had the most of it.
    pub busy_ns: u64,
    /// GPU time in ns charged for work of the others that NVML has not reported yet, and will.
    begun_ns: u64,
    /// GPU time in ns charged for work of the others that NVML will not report any more.
    exited_ns: u64,
}

impl Compared {
    /// Compares the processes of two readings.
    #[must_use]
    pub fn new(
        before: &BTreeMap<ProcessId, ProcessCharge>,
        now: &BTreeMap<ProcessId, ProcessCharge>,
    ) -> Self {
        let mut compared = Self::default();
        for (process, charge) in now {
            let before = before.get(process);
            let busy_ns = charge.busy_ns.saturating_sub(before.map_or(0, |before| before.busy_ns));
            compared.busy_ns = compared.busy_ns.max(busy_ns);
            let Some(before) = before else {
                compared.begun_ns = compared.begun_ns.saturating_add(charge.outstanding_ns);
                continue;
            };
            let charged_ns = charge.gpu_ns.saturating_sub(before.gpu_ns);
            compared.charged_ns = compared.charged_ns.saturating_add(charged_ns);
            compared.percent = compared.percent.saturating_add(charge.percent);
            compared.working += u32::from(charge.percent > 0);
        }
        for (_, charge) in before.iter().filter(|(process, _)| !now.contains_key(process)) {
            compared.exited_ns = compared.exited_ns.saturating_add(charge.outstanding_ns);
        }
        compared
    }

    /// Returns the GPU time in ns that counts as used, of this that was charged in this time.
    #[must_use]
    pub fn used_ns(&self, charged_ns: u64, wall_ns: u64) -> u64 {
        let others_ns = charged_ns.saturating_sub(self.charged_ns);
        (wall_ns / 100 * u64::from(self.percent))
            .saturating_add(others_ns)
            .saturating_add(self.exited_ns)
            .saturating_sub(self.begun_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// A reading: process, charged and outstanding percent of a second, and NVML's percent.
    fn reading(processes: &[(u32, u64, u64, u32)]) -> BTreeMap<ProcessId, ProcessCharge> {
        let percent = |of: u64| of * SECOND / 100;
        let charge = |&(pid, charged, outstanding, used): &(u32, u64, u64, u32)| {
            let (gpu_ns, outstanding_ns) = (percent(charged), percent(outstanding));
            let busy_ns = 2 * gpu_ns;
            ((pid, 7), ProcessCharge { gpu_ns, outstanding_ns, busy_ns, percent: used })
        };
        processes.iter().map(charge).collect()
    }

    fn used(before: &[(u32, u64, u64, u32)], now: &[(u32, u64, u64, u32)], charged: u64) -> u64 {
        let compared = Compared::new(&reading(before), &reading(now));
        compared.used_ns(charged * SECOND / 100, SECOND) * 100 / SECOND
    }

    #[test]
    fn processes_of_both_readings_have_used_what_nvml_reports() {
        assert_eq!(used(&[(1, 10, 0, 0)], &[(1, 40, 0, 60)], 30), 60);
    }

    #[test]
    fn others_have_used_what_they_were_charged() {
        assert_eq!(used(&[], &[(1, 30, 0, 90)], 30), 30, "begun");
        assert_eq!(used(&[(1, 10, 0, 0)], &[], 30), 30, "exited");
        assert_eq!(used(&[(1, 10, 0, 0)], &[(1, 20, 0, 15), (2, 5, 0, 1)], 15), 20, "both");
    }

    #[test]
    fn work_under_way_at_the_first_reading_is_used_later() {
        assert_eq!(used(&[], &[(1, 30, 20, 0)], 30), 10);
        assert_eq!(used(&[(1, 30, 20, 0)], &[(1, 30, 0, 20)], 0), 20);
    }

    #[test]
    fn work_under_way_at_the_last_reading_was_used() {
        assert_eq!(used(&[(1, 30, 20, 10)], &[], 0), 20, "the ledger has it since then");
    }

    #[test]
    fn busy_time_is_that_of_the_busiest_process() {
        let (before, now) = (reading(&[(1, 30, 0, 0)]), reading(&[(1, 40, 0, 10), (2, 15, 0, 0)]));
        assert_eq!(Compared::new(&before, &now).busy_ns, 30 * SECOND / 100);
    }

    #[test]
    fn another_process_with_the_same_pid_is_another() {
        let mut now = reading(&[(1, 5, 0, 90)]);
        let charge = now.remove(&(1, 7)).expect("added");
        now.insert((1, 8), charge);
        let compared = Compared::new(&reading(&[(1, 30, 0, 0)]), &now);
        assert_eq!((compared.used_ns(SECOND / 20, SECOND), compared.working), (SECOND / 20, 0));
    }

    #[test]
    fn nothing_that_a_tenant_writes_overflows() {
        let most = ProcessCharge {
            gpu_ns: u64::MAX,
            outstanding_ns: u64::MAX,
            busy_ns: u64::MAX,
            percent: u32::MAX,
        };
        let readings = [(1, 1), (2, 1), (3, 1)].map(|process| (process, most));
        let (before, now) = (readings[..2].iter().copied(), readings[1..].iter().copied());
        let compared = Compared::new(&before.collect(), &now.collect());
        assert_eq!(compared.used_ns(u64::MAX, SECOND), 0);
    }
}
