//! The virtual clock and all events.

use core::sync::atomic::Ordering;
use tessera_intercept_limiter::compute::{
    Arbiter, BURST_GPU_NS, Contention, Gain, Key, LaunchPlan, Observation, Published, Rate,
    Submission, Tenant, busy_of, charge_exited, needs_metering,
};

use crate::cpu::{CpuSpec, Quota};
use crate::gpu::{Gpu, GpuSpec, Kernel, Spin};
use crate::limiter::{ContainerLimiter, GpuEventTimer, Limiter, LimiterDecision, ProcessLimiter};
use crate::nvml::{ClosedLoop, NVML_PERIOD};
use crate::others::Hami;
use crate::program::{Pattern, Program};
use crate::random::Random;
use crate::record::Record;
use crate::{MS, US};

/// Length of the driver's queue, after which a launch blocks.
const QUEUE: usize = 1024;
/// Time between two readings of NVML by the host's driver.
const READING: u64 = 1_000 * MS;
/// Time until a GPU sees what its peer has done.
const PEER_DELAY: u64 = 10 * US;
/// Number of containers that the host manages.
const TENANTS: usize = 8;

/// A container.
#[derive(Debug, Clone)]
pub struct Container {
    /// Program of each process.
    pub program: Program,
    /// Number of its GPU.
    pub gpu: usize,
    /// Number of processes.
    pub processes: usize,
    /// Limiter.
    pub limiter: Limiter,
    /// Cores in percent.
    pub percent: u32,
    /// The most that it gets under `Balance`, in percent.
    pub limit_percent: u32,
    /// Priority for spare time; the lowest is first.
    pub priority: u8,
    /// CPU limit of all its processes in percent of a CPU.
    pub cpu_percent: Option<u32>,
}

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

#[derive(Debug)]
struct Process {
    container: usize,
    slot: usize,
    gpu: usize,
    context: usize,
    limiter: ProcessLimiter,
    wake: u64,
    launched: u64,
    unsynced: u32,
    /// Its next step, when it wakes.
    phase: Phase,
}

/// The next step of a process.
#[derive(Debug, Clone, Copy)]
enum Phase {
    /// Asks to launch.
    Launch,
    /// Submits a launch as planned.
    Admitted(LaunchPlan),
    /// Has submitted a launch as planned.
    Submitted(LaunchPlan, Submission),
    /// Has submitted a launch.
    Launched,
    /// Returns from a synchronisation.
    Synced,
}

/// The tokens that a container would have if its limiter knew the GPU time of each kernel at once.
#[derive(Debug, Clone, Copy, Default)]
struct Ideal {
    at: u64,
    ran: u64,
    /// GPU-ns; negative: a debt.
    tokens: i64,
    /// The time since which a launch waits although there is no debt.
    waits_since: Option<u64>,
    longest: u64,
}

impl Ideal {
    fn observe(&mut self, now: u64, ran: u64, percent: u32, waits: bool) {
        let earned = (now - self.at) * u64::from(percent) / 100;
        let tokens = self.tokens + earned as i64 - (ran - self.ran) as i64;
        let since = self.waits_since.filter(|_| self.tokens > 0);
        self.longest = self.longest.max(since.map_or(0, |since| now - since));
        (self.at, self.ran, self.tokens) = (now, ran, tokens.min(BURST_GPU_NS as i64));
        self.waits_since = (waits && self.tokens > 0).then(|| since.unwrap_or(now));
    }
}

/// A GPU, its containers and its host.
#[derive(Debug)]
pub struct World {
    gpus: Vec<Gpu>,
    spec: GpuSpec,
    cpu: CpuSpec,
    quotas: Vec<Option<Quota>>,
    ideals: Vec<Ideal>,
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
    closed_loop: ClosedLoop,
    read_at: u64,
    next_reading: u64,
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
            gpus: Vec::new(),
            spec,
            cpu: CpuSpec::default(),
            quotas: Vec::new(),
            ideals: Vec::new(),
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
            closed_loop: ClosedLoop::default(),
            read_at: 0,
            next_reading: if host.measures { READING } else { u64::MAX },
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
        let gpu = container.gpu;
        while self.gpus.len() <= gpu {
            self.gpus.push(Gpu::new(self.spec));
        }
        for slot in 0..container.processes {
            let context = self.gpus[gpu].add_context(container.program.streams, limiter.events());
            let wake = container.program.next_active(self.random.between(0, 2 * MS));
            let process_limiter = limiter.process_limiter();
            self.processes.push(Process {
                container: number,
                slot,
                gpu,
                context,
                limiter: process_limiter,
                wake,
                launched: 0,
                unsynced: 0,
                phase: Phase::Launch,
            });
        }
        self.ideals.push(Ideal::default());
        self.quotas.push(container.cpu_percent.map(Quota::of));
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
        self.containers[container].1.charged(self.now).gpu_ns
    }

    /// Returns the longest time for which a launch of a container waited although the GPU time of
    /// its kernels was within the cap.
    #[must_use]
    pub fn longest_unneeded_wait(&self, container: usize) -> u64 {
        self.ideals[container].longest
    }

    /// Sets the slice that limiters assume, which may differ from the GPU's.
    pub fn set_assumed_slice(&mut self, slice: u64) {
        self.assumed_slice = slice;
    }

    /// Sets the CPU time of submissions, and how threads are preempted.
    pub fn set_cpu(&mut self, cpu: CpuSpec) {
        self.cpu = cpu;
    }

    /// Runs until a time.
    pub fn run(&mut self, until: u64) {
        while self.now < until {
            let next = self.processes.iter().map(|process| process.wake).min().unwrap_or(u64::MAX);
            let next_task =
                self.next_note.min(self.next_host).min(self.next_nvml).min(self.next_watch);
            let next_task = next_task.min(self.next_reading);
            let arrives = self.pending_publication.as_ref().map_or(u64::MAX, |(at, _)| *at);
            let to = next.min(next_task).min(arrives).min(until);
            let to = if self.gpus.len() > 1 { to.min(self.now + PEER_DELAY) } else { to };
            if let Some((gpu, context, at)) = self.advance(to) {
                self.now = at;
                self.wake(gpu, context);
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

    /// Advances all GPUs until `to`, or until a wait is over.
    fn advance(&mut self, to: u64) -> Option<(usize, usize, u64)> {
        let started: Vec<_> = self.gpus.iter().map(|gpu| gpu.started_kernels(0)).collect();
        for (at, gpu) in self.gpus.iter_mut().enumerate() {
            if let Some(peer) = started.get(at ^ 1) {
                gpu.set_peer(0, *peer);
            }
            if let Some((context, time)) = gpu.advance(to) {
                return Some((at, context, time));
            }
        }
        None
    }

    /// Kills a process with SIGKILL. Its slot is reclaimed at once.
    pub fn kill(&mut self, container: usize, slot: usize) {
        let is_target =
            |process: &&mut Process| process.container == container && process.slot == slot;
        let Some(process) = self.processes.iter_mut().find(is_target) else { return };
        process.wake = u64::MAX;
        self.gpus[process.gpu].kill(process.context);
        let limiter = &self.containers[container].1;
        let page = &limiter.slots[slot];
        let due = &limiter.page.due_ns;
        charge_exited(
            due,
            &page.busy_since_ns,
            &page.outstanding_ns,
            self.now,
            limiter.limiter.entitlement(limiter.percent).share,
            Contention::NONE,
        );
        page.waiting_since_ns.store(0, Ordering::Relaxed);
    }

    /// Wakes the process whose wait is over.
    fn wake(&mut self, gpu: usize, context: usize) {
        let (cpu, now) = (self.cpu, self.now);
        let is_waiting = |process: &&mut Process| (process.gpu, process.context) == (gpu, context);
        let Some(process) = self.processes.iter_mut().find(is_waiting) else { return };
        let quota = self.quotas[process.container].as_mut();
        process.wake = cpu.work(quota, now, cpu.sync, &mut self.random);
    }

    fn act(&mut self, at: usize) {
        match core::mem::replace(&mut self.processes[at].phase, Phase::Launch) {
            Phase::Launch => self.launch(at),
            Phase::Admitted(plan) => self.submit(at, Some(plan)),
            Phase::Submitted(plan, submission) => {
                self.report(at, plan, submission);
                self.launched(at);
            }
            Phase::Launched => self.launched(at),
            Phase::Synced => self.synced(at),
        }
    }

    /// Tells the limiter when a launch and its events were submitted.
    fn report(&mut self, at: usize, plan: LaunchPlan, submission: Submission) {
        let process = &mut self.processes[at];
        let is_pending = |pair: tessera_intercept_limiter::compute::EventPair| {
            self.gpus[process.gpu].completed(process.context, pair.before.0).is_none()
        };
        let was_queued = plan.pair.is_some_and(is_pending);
        let submission = Submission { was_queued, ..submission };
        ContainerLimiter::submitted(&mut process.limiter, plan, submission);
    }

    fn synced(&mut self, at: usize) {
        let now = self.now;
        let process = &mut self.processes[at];
        let (container, limiter) = &mut self.containers[process.container];
        let gpu = &self.gpus[process.gpu];
        limiter.synced(&mut process.limiter, process.slot, gpu, process.context, now);
        match container.program.pattern {
            Pattern::Sync { gap } if gap > 0 => process.wake = now + gap,
            _ => self.launch(at),
        }
    }

    fn launch(&mut self, at: usize) {
        let now = self.now;
        let process = &mut self.processes[at];
        let (container, limiter) = &mut self.containers[process.container];
        let program = &container.program;
        let active = program.next_active(now);
        // A launch that is delayed is made, whatever time it is then.
        if active > now && !process.limiter.is_waiting() {
            process.wake = active;
            return;
        }
        if self.gpus[process.gpu].queued(process.context) >= QUEUE {
            process.wake = u64::MAX;
            self.gpus[process.gpu].wait_for(process.context, QUEUE - 1);
            return;
        }
        let (key, stream) = next_launch(program, process);
        let mut events = GpuEventTimer { gpu: &self.gpus[process.gpu], context: process.context };
        let decision =
            limiter.decide(&mut process.limiter, process.slot, (key, stream), &mut events, now);
        let waits = matches!(decision, LimiterDecision::RetryAt(_));
        let (number, percent) = (process.container, container.percent);
        self.ideals[number].observe(now, ran(&self.gpus, &self.processes, number), percent, waits);
        let process = &mut self.processes[at];
        match decision {
            LimiterDecision::RetryAt(until) => {
                process.wake = until.max(now) + self.random.between(5 * US, 60 * US);
            }
            LimiterDecision::Admit(None) => self.submit(at, None),
            LimiterDecision::Admit(Some(plan)) => {
                let quota = self.quotas[process.container].as_mut();
                process.wake = self.cpu.work(quota, now, self.cpu.decision, &mut self.random);
                process.phase = Phase::Admitted(plan);
            }
        }
    }

    /// Submits a launch, and the events that the limiter wants.
    fn submit(&mut self, at: usize, plan: Option<LaunchPlan>) {
        let (cpu, random) = (self.cpu, &mut self.random);
        let process = &mut self.processes[at];
        let program = &self.containers[process.container].0.program;
        let quota = &mut self.quotas[process.container];
        let (context, (_, stream)) = (process.context, next_launch(program, process));
        let gpu = &mut self.gpus[process.gpu];
        let kernel = next_kernel(program, process.unsynced, random);
        let mut now = self.now;
        let was_idle = gpu.is_empty(context, stream);
        let mut submission =
            Submission { before: now, launched: 0, behind: 0, was_idle, was_queued: false };
        let pair = plan.and_then(|plan| plan.pair);
        if let Some(pair) = pair {
            for event in pair.calibration.into_iter().chain([pair.before]) {
                now = cpu.event(quota.as_mut(), now, random);
                gpu.record(context, stream, event.0, now);
            }
            submission.before = now;
        }
        now = cpu.launch(quota.as_mut(), now, random);
        gpu.launch(context, stream, kernel, now);
        let unseen = program.unseen;
        submission.launched = now;
        if let Some(pair) = pair {
            now = cpu.event(quota.as_mut(), now, random);
            gpu.record(context, stream, pair.behind.0, now);
            submission.behind = now;
        }
        if unseen > 0 {
            gpu.launch(context, stream, Kernel { ns: unseen, ..kernel }, now);
        }
        process.launched += 1;
        process.unsynced += 1;
        process.wake = now;
        process.phase = match plan.filter(|_| pair.is_some()) {
            Some(plan) => Phase::Submitted(plan, submission),
            None => Phase::Launched,
        };
    }

    /// Goes on after a launch as the program's pattern says.
    fn launched(&mut self, at: usize) {
        let now = self.now;
        let process = &mut self.processes[at];
        let syncs = match self.containers[process.container].0.program.pattern {
            Pattern::Sync { .. } => true,
            Pattern::Batch { launches } => process.unsynced >= launches,
            Pattern::Beside { launches, .. } => process.unsynced > launches,
            Pattern::Rendezvous => process.unsynced == 2,
            Pattern::Rank { compute } => process.unsynced > compute,
            Pattern::Sparse { every } => {
                process.wake = now + every;
                return;
            }
            Pattern::Async | Pattern::Graph => false,
        };
        if !syncs {
            return self.launch(at);
        }
        process.unsynced = 0;
        process.phase = Phase::Synced;
        process.wake = u64::MAX;
        let (gpu, context) = (process.gpu, process.context);
        if self.gpus[gpu].queued(context) == 0 {
            return self.wake(gpu, context);
        }
        self.gpus[gpu].wait_for(context, 0);
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
        let wall_ns = now - core::mem::replace(&mut self.read_at, now);
        let container_of = |process: usize| self.processes[process].container;
        let gains = self.closed_loop.read(wall_ns, &containers, container_of, &mut self.random);
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

    fn ran(&self, container: usize) -> u64 {
        ran(&self.gpus, &self.processes, container)
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

/// Returns the GPU time of a container.
fn ran(gpus: &[Gpu], processes: &[Process], container: usize) -> u64 {
    let processes = processes.iter().filter(|process| process.container == container);
    processes.map(|process| gpus[process.gpu].ran(process.context)).sum()
}

/// Returns what a process launches next, and its stream.
fn next_launch(program: &Program, process: &Process) -> (Key, usize) {
    let (slot, launched) = (process.slot, process.launched as usize);
    let kernel = |function| Key::kernel(function, [1320, 1, 1], [256, 1, 1]);
    match program.pattern {
        Pattern::Graph => (Key::graph(0x7000 + slot), launched % program.streams),
        Pattern::Beside { .. } if process.unsynced == 0 => (kernel(0x100), 1),
        Pattern::Beside { .. } => (kernel(0x1000), 0),
        Pattern::Rank { compute } if process.unsynced == compute => (kernel(0x300), 0),
        Pattern::Rendezvous => (kernel(0x200), process.unsynced as usize),
        _ => (kernel(0x1000 + launched % program.shapes * 64), launched % program.streams),
    }
}

/// Returns the next kernel after `unsynced` launches since the last synchronisation.
fn next_kernel(program: &Program, unsynced: u32, random: &mut Random) -> Kernel {
    let kernel = Kernel {
        fill_percent: program.fill_percent,
        overlap: program.overlap,
        ..Kernel::new(length(program, random))
    };
    match program.pattern {
        // A kernel of NCCL has a few blocks.
        Pattern::Beside { long, .. } if unsynced == 0 => {
            Kernel { fill_percent: 10, ..Kernel::new(long) }
        }
        Pattern::Rendezvous if unsynced == 0 => Kernel { spins: Spin::NextKernel, ..kernel },
        Pattern::Rank { compute } if unsynced == compute => {
            Kernel { spins: Spin::Peer, fill_percent: 10, ..kernel }
        }
        _ => kernel,
    }
}

/// Returns the run time of the next kernel.
fn length(program: &Program, random: &mut Random) -> u64 {
    if program.tail_every > 0 && random.between(0, u64::from(program.tail_every)) == 0 {
        return program.tail;
    }
    random.between(program.kernel * 9 / 10, program.kernel * 11 / 10 + 1)
}
