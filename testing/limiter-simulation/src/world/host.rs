//! The host: reads ledgers and NVML, and publishes.

use core::sync::atomic::Ordering;

use tessera_intercept_limiter::compute::{
    Gain, Observation, Published, Rate, Tenant, busy_of, needs_metering,
};

use super::{Container, World};
use crate::MS;
use crate::gpu::Gpu;
use crate::limiter::{Limiter, ProcessLimiter};
use crate::nvml::NVML_PERIOD;
use crate::others::Hami;
use crate::record::Record;

/// Time between two readings of NVML by the host's driver.
pub(super) const READING: u64 = 1_000 * MS;
/// Number of containers that the host manages.
pub(super) const TENANTS: usize = 8;

/// The host's driver.
#[derive(Debug, Clone, Copy)]
pub struct Host {
    /// Time between two reads of the ledgers; `None`: no driver.
    pub every: Option<u64>,
    /// Delay from the read to the containers' view.
    pub delay: u64,
    /// True if it corrects what is charged by what NVML reports.
    pub measures: bool,
}

impl Default for Host {
    fn default() -> Self {
        Self { every: Some(50 * MS), delay: 10 * MS, measures: true }
    }
}

impl World {
    /// Runs the host's tasks that are due.
    pub(super) fn run_tasks(&mut self) {
        let now = self.now;
        if self.pending_publication.as_ref().is_some_and(|(at, _)| *at <= now)
            && let Some((_, published)) = self.pending_publication.take()
        {
            for ((_, limiter), published) in self.containers.iter().zip(published) {
                if let Some(published) = published {
                    published.write(&limiter.published);
                }
            }
        }
        if self.next_note <= now {
            self.next_note += Record::STEP;
            self.record.add_switching_sample(self.gpus.iter().map(Gpu::switched).sum());
            for container in 0..self.containers.len() {
                let ran = self.ran(container);
                self.record.add_sample(container, ran);
            }
        }
        if self.next_host <= now {
            let every = self.host.every.unwrap_or(u64::MAX);
            self.next_host += every + self.random.between(0, every / 10);
            let published = self.read_ledgers();
            self.pending_publication = Some((now + self.host.delay, published));
        }
        if self.next_nvml <= now {
            self.next_nvml += NVML_PERIOD;
            for container in 0..self.containers.len() {
                let ran = self.ran(container);
                let (last, part) = &mut self.nvml[container];
                *part = (ran - *last) as f64 / NVML_PERIOD as f64;
                *last = ran;
            }
            let ran =
                self.processes.iter().map(|process| self.gpus[process.gpu].ran(process.context));
            self.closed_loop.sample(now, ran);
        }
        if self.next_reading <= now {
            self.next_reading += READING + self.random.between(0, READING / 10);
            self.publish_gains();
        }
        if self.next_watch <= now {
            self.next_watch += Hami::PERIOD;
            self.adjust_models();
        }
    }

    /// Reads NVML as the host's driver, and publishes the gains.
    fn publish_gains(&mut self) {
        let now = self.now;
        let containers: Vec<_> =
            self.containers.iter().map(|(_, limiter)| limiter.charged(now)).collect();
        let container_of = |process: usize| self.processes[process].container;
        let gains = self.closed_loop.read(now, &containers, container_of, &mut self.random);
        for ((_, limiter), gain) in self.containers.iter().zip(gains) {
            limiter.published.gain.store(gain.word(0, now), Ordering::Relaxed);
        }
    }

    /// Adjusts the models of other limiters.
    fn adjust_models(&mut self) {
        for process in &mut self.processes {
            if let ProcessLimiter::Hami(hami) = &mut process.limiter {
                hami.adjust(
                    self.containers[process.container].1.percent,
                    self.nvml[process.container].1,
                );
            }
        }
        for ((_, limiter), (_, part)) in self.containers.iter_mut().zip(&self.nvml) {
            limiter.aimd.adjust(limiter.percent, *part);
        }
    }

    /// Reads the ledgers as the host and returns the values to publish.
    fn read_ledgers(&mut self) -> [Option<Published>; TENANTS] {
        let now = self.now;
        let mut observations = [None; TENANTS];
        for ((observation, (container, limiter)), waited) in
            observations.iter_mut().zip(&self.containers).zip(&mut self.waited)
        {
            if !matches!(container.limiter, Limiter::Tessera(_)) {
                continue;
            }
            let waited_ns = limiter.page.waited_ns.load(Ordering::Relaxed);
            let waits =
                limiter.slots.iter().any(|slot| slot.waiting_since_ns.load(Ordering::Relaxed) != 0);
            *observation = Some(Observation {
                tenant: tenant(container),
                busy_ns: busy_of(limiter.slots.iter(), now),
                gpu_ns: limiter.charged(now).gpu_ns,
                gain: Gain::read(&limiter.published, now),
                waited: waits || waited_ns > *waited,
            });
            *waited = waited_ns;
        }
        let mut published = self.arbiter.step(now, &observations);
        let tenants: Vec<_> =
            self.containers.iter().map(|(container, _)| tenant(container)).collect();
        for (at, published) in published.iter_mut().enumerate() {
            let others = tenants.iter().enumerate().filter(|(other, _)| *other != at);
            if let (Some(published), Some(own)) = (published, tenants.get(at)) {
                published.is_metered = needs_metering(own, others.map(|(_, other)| other));
            }
        }
        published
    }
}

/// Returns a container as the host sees it.
fn tenant(container: &Container) -> Tenant {
    Tenant {
        entitlement: container.limiter.entitlement(container.percent),
        limit: Rate::from_percent(container.limit_percent),
        priority: container.priority,
    }
}
