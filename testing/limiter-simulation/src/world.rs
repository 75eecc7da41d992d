//! The virtual clock and all events.

use core::sync::atomic::Ordering;
use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_limiter::compute::{
    Arbiter, Crowd, Key, Observation, Published, Tenant, bury, busy_of,
};

use crate::gpu::{Gpu, GpuSpec};
use crate::limiter::{ContainerLimiter, GpuTimer, LaunchDecision, Limiter, ProcessLimiter};
use crate::others::Hami;
use crate::program::{Pattern, Program};
use crate::random::Random;
use crate::record::Record;
use crate::{MS, US};

/// CPU time of a launch, and of each event with it.
const LAUNCH: u64 = 4 * US;
const EVENT: u64 = 1_500;
/// Length of the driver's queue, after which a launch blocks.
const QUEUE: usize = 1024;
/// Time of the return from a synchronisation.
const SYNC: u64 = 10 * US;
/// Period of NVML's utilisation.
const NVML_PERIOD: u64 = 1_000 * MS / 6;
/// Number of containers that the host manages.
const TENANTS: usize = 8;

/// A container.
#[derive(Debug, Clone)]
pub struct Container {
    /// Program of each process.
    pub program: Program,
    /// Number of processes.
    pub processes: usize,
    /// Limiter.
    pub limiter: Limiter,
    /// Cores in percent.
    pub percent: u32,
    /// Priority for spare time; the lowest is first.
    pub priority: u8,
}

/// The host's driver.
#[derive(Debug, Clone, Copy)]
pub struct Host {
    /// Time between two reads of the ledgers; `None`: no driver.
    pub every: Option<u64>,
    /// Delay from the read to the containers' view.
    pub delay: u64,
}

impl Default for Host {
    fn default() -> Self {
        Self { every: Some(50 * MS), delay: 10 * MS }
    }
}

#[derive(Debug)]
struct Process {
    container: usize,
    slot: usize,
    context: usize,
    limiter: ProcessLimiter,
    wake: u64,
    launched: u64,
    unsynced: u32,
    /// True if it is returning from a synchronisation.
    syncing: bool,
}

/// A GPU, its containers and its host.
#[derive(Debug)]
pub struct World {
    gpu: Gpu,
    containers: Vec<(Container, ContainerLimiter)>,
    processes: Vec<Process>,
    host: Host,
    arbiter: Arbiter<TENANTS>,
    waited: [u64; TENANTS],
    pending_publication: Option<(u64, [Option<Published>; TENANTS])>,
    random: Random,
    assumed_slice: u64,
    record: Record,
    nvml: Vec<(u64, f64)>,
    next_host: u64,
    next_note: u64,
    next_nvml: u64,
    next_watch: u64,
    now: u64,
}

impl World {
    /// Returns an empty world, whose clock starts at 0.
    #[must_use]
    pub fn new(spec: GpuSpec, host: Host, seed: u64) -> Self {
        Self {
            gpu: Gpu::new(spec),
            containers: Vec::new(),
            processes: Vec::new(),
            host,
            arbiter: Arbiter::default(),
            waited: [0; TENANTS],
            pending_publication: None,
            random: Random::new(seed),
            assumed_slice: spec.slice,
            record: Record::default(),
            nvml: Vec::new(),
            next_host: host.every.unwrap_or(u64::MAX),
            next_note: 0,
            next_nvml: NVML_PERIOD,
            next_watch: Hami::PERIOD,
            now: 0,
        }
    }

    /// Adds a container and returns its number.
    pub fn add(&mut self, container: Container) -> usize {
        let number = self.containers.len();
        let limiter = ContainerLimiter::new(
            container.limiter,
            container.percent,
            container.processes,
            self.assumed_slice,
        );
        for slot in 0..container.processes {
            let context = self.gpu.add_context(container.program.streams, limiter.events());
            let wake = container.program.next_active(self.random.between(0, 2 * MS));
            let process_limiter = limiter.process_limiter();
            self.processes.push(Process {
                container: number,
                slot,
                context,
                limiter: process_limiter,
                wake,
                launched: 0,
                unsynced: 0,
                syncing: false,
            });
        }
        self.containers.push((container, limiter));
        self.nvml.push((0, 0.0));
        number
    }

    /// Returns the record so far.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Returns the number of launches of a container.
    #[must_use]
    pub fn launches(&self, container: usize) -> u64 {
        self.processes
            .iter()
            .filter(|process| process.container == container)
            .map(|process| process.launched)
            .sum()
    }

    /// Returns the GPU time that a container's limiter has estimated.
    #[must_use]
    pub fn estimated_gpu_time(&self, container: usize) -> u64 {
        let limiter = &self.containers[container].1;
        limiter.slots.iter().map(|slot| slot.gpu_ns.load(Ordering::Relaxed)).sum()
    }

    /// Sets the slice that limiters assume, which may differ from the GPU's.
    pub fn set_assumed_slice(&mut self, slice: u64) {
        self.assumed_slice = slice;
    }

    /// Runs until a time.
    pub fn run(&mut self, until: u64) {
        while self.now < until {
            let next = self.processes.iter().map(|process| process.wake).min().unwrap_or(u64::MAX);
            let next_task =
                self.next_note.min(self.next_host).min(self.next_nvml).min(self.next_watch);
            let arrives = self.pending_publication.as_ref().map_or(u64::MAX, |(at, _)| *at);
            let to = next.min(next_task).min(arrives).min(until);
            if let Some((context, at)) = self.gpu.advance(to) {
                self.now = at;
                self.wake(context);
                continue;
            }
            self.now = to;
            self.run_tasks();
            for at in 0..self.processes.len() {
                if self.processes[at].wake <= self.now {
                    self.act(at);
                }
            }
        }
    }

    /// Kills a process with SIGKILL. Its slot is reclaimed at once.
    pub fn kill(&mut self, container: usize, slot: usize) {
        let is_target =
            |process: &&mut Process| process.container == container && process.slot == slot;
        let Some(process) = self.processes.iter_mut().find(is_target) else { return };
        process.wake = u64::MAX;
        self.gpu.kill(process.context);
        let limiter = &self.containers[container].1;
        let page = &limiter.slots[slot];
        let due = &limiter.page.due_ns;
        bury(
            due,
            &page.busy_since_ns,
            &page.outstanding_ns,
            self.now,
            limiter.share,
            Crowd::NOBODY,
        );
        page.waiting_since_ns.store(0, Ordering::Relaxed);
    }

    /// Wakes the process whose wait is over.
    fn wake(&mut self, context: usize) {
        if let Some(process) = self.processes.iter_mut().find(|process| process.context == context)
        {
            process.wake = self.now + SYNC;
        }
    }

    fn act(&mut self, at: usize) {
        let now = self.now;
        let process = &mut self.processes[at];
        let (container, limiter) = &mut self.containers[process.container];
        let program = &container.program;
        if process.syncing {
            process.syncing = false;
            limiter.synced(&mut process.limiter, process.slot, &self.gpu, process.context, now);
            if let Pattern::Sync { gap } = program.pattern {
                process.wake = now + gap;
                if gap > 0 {
                    return;
                }
            }
        }
        let active = program.next_active(now);
        if active > now {
            process.wake = active;
            return;
        }
        if self.gpu.queued(process.context) >= QUEUE {
            process.wake = u64::MAX;
            self.gpu.wait_for(process.context, QUEUE - 1);
            return;
        }
        let key = match program.pattern {
            Pattern::Graph => Key::graph(0x7000 + process.slot),
            _ => Key::kernel(0x1000, [1320, 1, 1], [256, 1, 1]),
        };
        let stream = process.launched as usize % program.streams;
        let mut events = GpuTimer { gpu: &self.gpu, context: process.context };
        match limiter.decide(&mut process.limiter, process.slot, key, &mut events, now) {
            LaunchDecision::RetryAt(until) => {
                process.wake = until.max(now) + self.random.between(5 * US, 60 * US);
            }
            LaunchDecision::Admit(between) => {
                let kernel = length(program, &mut self.random);
                if let Some((before, _)) = between {
                    self.gpu.record(process.context, stream, before);
                }
                self.gpu.launch(process.context, stream, kernel);
                if let Some((_, behind)) = between {
                    self.gpu.record(process.context, stream, behind);
                }
                let took = LAUNCH + if between.is_some() { 2 * EVENT } else { 0 };
                process.launched += 1;
                process.unsynced += 1;
                process.wake = now + took;
                let syncs = match program.pattern {
                    Pattern::Sync { .. } => true,
                    Pattern::Batch { launches } => process.unsynced >= launches,
                    Pattern::Sparse { every } => {
                        process.wake = now + every;
                        false
                    }
                    Pattern::Async | Pattern::Graph => false,
                };
                if syncs {
                    process.unsynced = 0;
                    process.syncing = true;
                    process.wake = u64::MAX;
                    self.gpu.wait_for(process.context, 0);
                }
            }
        }
    }

    fn run_tasks(&mut self) {
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
            self.record.add_switching_sample(self.gpu.switched());
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
        }
        if self.next_watch <= now {
            self.next_watch += Hami::PERIOD;
            self.adjust_models();
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
            let Limiter::Tessera(policy) = container.limiter else { continue };
            let waited_ns = limiter.page.waited_ns.load(Ordering::Relaxed);
            let waits =
                limiter.slots.iter().any(|slot| slot.waiting_since_ns.load(Ordering::Relaxed) != 0);
            let share = if policy == ComputePolicy::None { 0 } else { container.percent };
            *observation = Some(Observation {
                tenant: Tenant {
                    policy,
                    share: tessera_intercept_limiter::compute::Rate::from_percent(share),
                    priority: container.priority,
                },
                busy_ns: busy_of(limiter.slots.iter(), now),
                gpu_ns: limiter.slots.iter().map(|slot| slot.gpu_ns.load(Ordering::Relaxed)).sum(),
                waited: waits || waited_ns > *waited,
            });
            *waited = waited_ns;
        }
        self.arbiter.step(now, &observations)
    }

    fn ran(&self, container: usize) -> u64 {
        let processes = self.processes.iter().filter(|process| process.container == container);
        processes.map(|process| self.gpu.ran(process.context)).sum()
    }
}

/// Returns the run time of the next kernel.
fn length(program: &Program, random: &mut Random) -> u64 {
    if program.tail_every > 0 && random.between(0, u64::from(program.tail_every)) == 0 {
        return program.tail;
    }
    random.between(program.kernel * 9 / 10, program.kernel * 11 / 10 + 1)
}
