//! The virtual clock and all events.

mod host;
mod ideal;
mod process;

use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_limiter::compute::{Arbiter, Contention, Published, charge_exited};

use core::sync::atomic::Ordering;

use crate::cpu::{CpuSpec, Quota};
use crate::gpu::{Gpu, GpuSpec};
use crate::limiter::{ContainerLimiter, Limiter};
use crate::nvml::{ClosedLoop, NVML_PERIOD};
use crate::others::Hami;
use crate::program::{Pattern, Program};
use crate::random::Random;
use crate::record::Record;
use crate::{MS, US};

pub use host::Host;

use host::{READING, TENANTS};
use ideal::Ideal;
use process::{Phase, Process};

/// Time until a GPU sees what its peer has done.
const PEER_DELAY: u64 = 10 * US;

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

impl Container {
    /// Returns a container with one process on GPU 0 and these cores.
    #[must_use]
    pub const fn new(program: Program, limiter: Limiter, percent: u32) -> Self {
        Self {
            program,
            gpu: 0,
            processes: 1,
            limiter,
            percent,
            limit_percent: 100,
            priority: 0,
            cpu_percent: None,
        }
    }

    /// Returns a container that has no work. A share alone under `Balance` is not metered at all.
    #[must_use]
    pub fn idle() -> Self {
        let program = Program::new(MS, Pattern::Async).active(vec![]);
        Self::new(program, Limiter::Tessera(ComputePolicy::None), 0)
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

    fn ran(&self, container: usize) -> u64 {
        ran(&self.gpus, &self.processes, container)
    }
}

/// Returns the GPU time of a container.
fn ran(gpus: &[Gpu], processes: &[Process], container: usize) -> u64 {
    let processes = processes.iter().filter(|process| process.container == container);
    processes.map(|process| gpus[process.gpu].ran(process.context)).sum()
}
