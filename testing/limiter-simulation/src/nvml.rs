//! NVML's utilization of processes, and the loop of the host's driver over it.

use tessera_intercept_limiter::compute::{Gain, GainEstimator, Interval, Rate};

use crate::MS;
use crate::random::Random;

/// Period of NVML's samples.
pub(crate) const NVML_PERIOD: u64 = 1_000 * MS / 6;

/// NVML's view of one process: the GPU time at the last samples.
#[derive(Debug, Clone, Copy, Default)]
struct Sampled {
    /// At the last sample.
    ran: u64,
    /// At the last sample that a reading has seen.
    read: u64,
}

/// NVML, and the estimates of the host's driver.
#[derive(Debug, Default)]
pub(crate) struct ClosedLoop {
    processes: Vec<Sampled>,
    sampled_at: u64,
    /// Time of the last sample of the last reading.
    read_sample_at: u64,
    read_at: u64,
    shares: Vec<ShareLoop>,
}

/// GPU time in the ledger of a container.
#[derive(Debug, Clone)]
pub(crate) struct Charged {
    /// Of each slot.
    pub(crate) busy_ns: Vec<u64>,
    pub(crate) gpu_ns: u64,
    pub(crate) outstanding_ns: u64,
    pub(crate) is_late: bool,
    pub(crate) rate: Rate,
}

#[derive(Debug, Clone, Default)]
struct ShareLoop {
    busy_ns: Vec<u64>,
    charged_ns: u64,
    estimator: GainEstimator,
}

impl ClosedLoop {
    /// Takes a sample of the GPU time of each process.
    pub(crate) fn sample(&mut self, now: u64, ran: impl Iterator<Item = u64>) {
        self.sampled_at = now;
        for (at, ran) in ran.enumerate() {
            if at == self.processes.len() {
                self.processes.push(Sampled::default());
            }
            self.processes[at].ran = ran;
        }
    }

    /// Reads the samples since the last reading as the driver does: the time by which the last one
    /// is too old and the resolution of a percent are NVML's, noise of up to a percent is that of
    /// GPUs.
    pub(crate) fn read(
        &mut self,
        now: u64,
        containers: &[Charged],
        container_of: impl Fn(usize) -> usize,
        random: &mut Random,
    ) -> Vec<Gain> {
        let wall_ns = now - core::mem::replace(&mut self.read_at, now);
        let sampled_ns = self.sampled_at.saturating_sub(self.read_sample_at).max(1);
        self.read_sample_at = self.sampled_at;
        let age_ns = now - self.sampled_at;
        let mut used = vec![(0, 0); containers.len()];
        for (at, process) in self.processes.iter_mut().enumerate() {
            let ran = process.ran - core::mem::replace(&mut process.read, process.ran);
            let percent = (ran * 100 + random.between(0, sampled_ns)) / sampled_ns;
            let (used_ns, processes) = &mut used[container_of(at)];
            *used_ns += wall_ns / 100 * percent;
            *processes += u32::from(percent > 0);
        }
        self.shares.resize(containers.len(), ShareLoop::default());
        let all_ns: u64 = used.iter().map(|(used_ns, _)| used_ns).sum();
        let shares = self.shares.iter_mut().zip(containers).zip(used);
        let gain = |((share, charged), (used_ns, processes)): ((&mut ShareLoop, &Charged), _)| {
            let before_ns = core::mem::replace(&mut share.charged_ns, charged.gpu_ns);
            let charged_ns = charged.gpu_ns.saturating_sub(before_ns);
            share.busy_ns.resize(charged.busy_ns.len(), 0);
            let busy = charged.busy_ns.iter().zip(&share.busy_ns);
            let busy_ns = busy.map(|(now_ns, before_ns)| now_ns.saturating_sub(*before_ns)).max();
            share.busy_ns.clone_from(&charged.busy_ns);
            share.estimator.add(Interval {
                wall_ns,
                age_ns: Some(age_ns),
                charged_ns,
                busy_ns: busy_ns.unwrap_or(0),
                outstanding_ns: charged.outstanding_ns,
                used_ns,
                processes,
                is_contended: all_ns > used_ns,
                is_late: charged.is_late,
                rate: charged.rate,
            });
            share.estimator.gain()
        };
        shares.map(gain).collect()
    }
}
