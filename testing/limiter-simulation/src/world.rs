//! The clock, and everything that happens.

use core::sync::atomic::Ordering;
use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_limiter::compute::{
    Arbiter, Crowd, Key, Observation, Published, Tenant, bury, busy_of,
};

use crate::gpu::{Gpu, GpuSpec};
use crate::limiter::{Enforced, Events, Limiter, Own, Verdict};
use crate::others::Hami;
use crate::program::{Pattern, Program};
use crate::random::Random;
use crate::record::Record;
use crate::{MS, US};

/// What a launch takes on the CPU, and each event with it.
const LAUNCH: u64 = 4 * US;
const EVENT: u64 = 1_500;
/// Launches that a driver takes before it blocks.
const QUEUE: usize = 1024;
/// How long the return from a synchronisation takes.
const SYNC: u64 = 10 * US;
/// NVML's utilisation is of periods of this length.
const NVML_PERIOD: u64 = 1_000 * MS / 6;
/// Containers that a host looks after.
const TENANTS: usize = 8;

/// One container.
#[derive(Debug, Clone)]
pub struct Container {
    /// What each process runs.
    pub program: Program,
    /// How many processes.
    pub processes: usize,
    /// What holds it.
    pub limiter: Limiter,
    /// Its cores in percent.
    pub percent: u32,
    /// Who gets what is left, the lowest first.
    pub priority: u8,
}

/// The host's driver.
#[derive(Debug, Clone, Copy)]
pub struct Host {
    /// Time between two looks at the ledgers; `None`: no driver.
    pub every: Option<u64>,
    /// From the look to what containers read.
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
    own: Own,
    wake: u64,
    launched: u64,
    unsynced: u32,
    /// It comes back from a synchronisation.
    syncing: bool,
}

/// A GPU, its containers and its host.
#[derive(Debug)]
pub struct World {
    gpu: Gpu,
    containers: Vec<(Container, Enforced)>,
    processes: Vec<Process>,
    host: Host,
    arbiter: Arbiter<TENANTS>,
    waited: [u64; TENANTS],
    on_its_way: Option<(u64, [Option<Published>; TENANTS])>,
    random: Random,
    believed_slice: u64,
    record: Record,
    nvml: Vec<(u64, f64)>,
    next_host: u64,
    next_note: u64,
    next_nvml: u64,
    next_watch: u64,
    now: u64,
}

impl World {
    /// Begins at second 1: monotonic clocks are not near 0.
    #[must_use]
    pub fn new(spec: GpuSpec, host: Host, seed: u64) -> Self {
        Self {
            gpu: Gpu::new(spec),
            containers: Vec::new(),
            processes: Vec::new(),
            host,
            arbiter: Arbiter::default(),
            waited: [0; TENANTS],
            on_its_way: None,
            random: Random::new(seed),
            believed_slice: spec.slice,
            record: Record::default(),
            nvml: Vec::new(),
            next_host: host.every.unwrap_or(u64::MAX),
            next_note: 0,
            next_nvml: NVML_PERIOD,
            next_watch: Hami::PERIOD,
            now: 0,
        }
    }

    /// Adds a container; answers its number.
    pub fn add(&mut self, container: Container) -> usize {
        let number = self.containers.len();
        let enforced = Enforced::new(
            container.limiter,
            container.percent,
            container.processes,
            self.believed_slice,
        );
        for slot in 0..container.processes {
            let context = self.gpu.add_context(container.program.streams, enforced.events());
            let wake = container.program.next_active(self.random.between(0, 2 * MS));
            let own = enforced.own();
            self.processes.push(Process {
                container: number,
                slot,
                context,
                own,
                wake,
                launched: 0,
                unsynced: 0,
                syncing: false,
            });
        }
        self.containers.push((container, enforced));
        self.nvml.push((0, 0.0));
        number
    }

    /// What happened so far.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Launches that a container made.
    #[must_use]
    pub fn launches(&self, container: usize) -> u64 {
        self.processes
            .iter()
            .filter(|process| process.container == container)
            .map(|process| process.launched)
            .sum()
    }

    /// GPU time that a container's limiter believes it used.
    #[must_use]
    pub fn believed(&self, container: usize) -> u64 {
        let enforced = &self.containers[container].1;
        enforced.slots.iter().map(|slot| slot.gpu_ns.load(Ordering::Relaxed)).sum()
    }

    /// Has containers believe in another slice than the GPU's.
    pub fn believe_in_slice(&mut self, slice: u64) {
        self.believed_slice = slice;
    }

    /// Goes on until then.
    pub fn run(&mut self, until: u64) {
        while self.now < until {
            let next = self.processes.iter().map(|process| process.wake).min().unwrap_or(u64::MAX);
            let chores =
                self.next_note.min(self.next_host).min(self.next_nvml).min(self.next_watch);
            let arrives = self.on_its_way.as_ref().map_or(u64::MAX, |(at, _)| *at);
            let to = next.min(chores).min(arrives).min(until);
            if let Some((context, at)) = self.gpu.advance(to) {
                self.now = at;
                self.wake(context);
                continue;
            }
            self.now = to;
            self.chores();
            for at in 0..self.processes.len() {
                if self.processes[at].wake <= self.now {
                    self.act(at);
                }
            }
        }
    }

    /// Kills a process with SIGKILL. Somebody reclaims its slot at once.
    pub fn kill(&mut self, container: usize, slot: usize) {
        let mine = |process: &&mut Process| process.container == container && process.slot == slot;
        let Some(process) = self.processes.iter_mut().find(mine) else { return };
        process.wake = u64::MAX;
        self.gpu.kill(process.context);
        let enforced = &self.containers[container].1;
        let page = &enforced.slots[slot];
        let due = &enforced.page.due_ns;
        bury(
            due,
            &page.busy_since_ns,
            &page.outstanding_ns,
            self.now,
            enforced.share,
            Crowd::NOBODY,
        );
        page.waiting_since_ns.store(0, Ordering::Relaxed);
    }

    /// What the GPU was waited for is done.
    fn wake(&mut self, context: usize) {
        if let Some(process) = self.processes.iter_mut().find(|process| process.context == context)
        {
            process.wake = self.now + SYNC;
        }
    }

    fn act(&mut self, at: usize) {
        let now = self.now;
        let process = &mut self.processes[at];
        let (container, enforced) = &mut self.containers[process.container];
        let program = &container.program;
        if process.syncing {
            process.syncing = false;
            enforced.synced(&mut process.own, process.slot, &self.gpu, process.context, now);
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
        let mut events = Events { gpu: &self.gpu, context: process.context };
        match enforced.ask(&mut process.own, process.slot, key, &mut events, now) {
            Verdict::WaitUntil(until) => {
                process.wake = until.max(now) + self.random.between(5 * US, 60 * US);
            }
            Verdict::Go(between) => {
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

    fn chores(&mut self) {
        let now = self.now;
        if self.on_its_way.as_ref().is_some_and(|(at, _)| *at <= now)
            && let Some((_, published)) = self.on_its_way.take()
        {
            for ((_, enforced), published) in self.containers.iter().zip(published) {
                if let Some(published) = published {
                    published.write(&enforced.published);
                }
            }
        }
        if self.next_note <= now {
            self.next_note += Record::STEP;
            self.record.note_switched(self.gpu.switched());
            for container in 0..self.containers.len() {
                let ran = self.ran(container);
                self.record.note(container, ran);
            }
        }
        if self.next_host <= now {
            let every = self.host.every.unwrap_or(u64::MAX);
            self.next_host += every + self.random.between(0, every / 10);
            let published = self.look();
            self.on_its_way = Some((now + self.host.delay, published));
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
            self.watch();
        }
    }

    /// Feeds the models of others.
    fn watch(&mut self) {
        for process in &mut self.processes {
            if let Own::Hami(hami) = &mut process.own {
                hami.look(
                    self.containers[process.container].1.percent,
                    self.nvml[process.container].1,
                );
            }
        }
        for ((_, enforced), (_, part)) in self.containers.iter_mut().zip(&self.nvml) {
            enforced.aimd.look(enforced.percent, *part);
        }
    }

    /// The host reads the ledgers.
    fn look(&mut self) -> [Option<Published>; TENANTS] {
        let now = self.now;
        let mut seen = [None; TENANTS];
        for ((place, (container, enforced)), waited) in
            seen.iter_mut().zip(&self.containers).zip(&mut self.waited)
        {
            let Limiter::Tessera(policy) = container.limiter else { continue };
            let waited_ns = enforced.page.waited_ns.load(Ordering::Relaxed);
            let waits = enforced
                .slots
                .iter()
                .any(|slot| slot.waiting_since_ns.load(Ordering::Relaxed) != 0);
            let share = if policy == ComputePolicy::None { 0 } else { container.percent };
            *place = Some(Observation {
                tenant: Tenant {
                    policy,
                    share: tessera_intercept_limiter::compute::Rate::from_percent(share),
                    priority: container.priority,
                },
                busy_ns: busy_of(enforced.slots.iter(), now),
                gpu_ns: enforced.slots.iter().map(|slot| slot.gpu_ns.load(Ordering::Relaxed)).sum(),
                waited: waits || waited_ns > *waited,
            });
            *waited = waited_ns;
        }
        self.arbiter.step(now, &seen)
    }

    fn ran(&self, container: usize) -> u64 {
        let of = self.processes.iter().filter(|process| process.container == container);
        of.map(|process| self.gpu.ran(process.context)).sum()
    }
}

/// How long the next kernel runs.
fn length(program: &Program, random: &mut Random) -> u64 {
    if program.tail_every > 0 && random.between(0, u64::from(program.tail_every)) == 0 {
        return program.tail;
    }
    random.between(program.kernel * 9 / 10, program.kernel * 11 / 10 + 1)
}
