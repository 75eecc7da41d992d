//! The steps of a process: launches, submissions and synchronisations.

use tessera_intercept_limiter::compute::{Key, LaunchPlan, Submission};

use super::{World, ran};
use crate::US;
use crate::gpu::{Kernel, Spin};
use crate::limiter::{ContainerLimiter, GpuEventTimer, LimiterDecision, ProcessLimiter};
use crate::program::{Pattern, Program};
use crate::random::Random;

/// Length of the driver's queue, after which a launch blocks.
const QUEUE: usize = 1024;

/// A process of a container.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) container: usize,
    pub(super) slot: usize,
    pub(super) gpu: usize,
    pub(super) context: usize,
    pub(super) limiter: ProcessLimiter,
    pub(super) wake: u64,
    pub(super) launched: u64,
    pub(super) unsynced: u32,
    /// Its next step, when it wakes.
    pub(super) phase: Phase,
}

/// The next step of a process.
#[derive(Debug, Clone, Copy)]
pub(super) enum Phase {
    /// Asks to launch.
    Launch,
    /// Submits a launch as planned.
    Admitted(LaunchPlan),
    /// Has submitted a launch as planned.
    Submitted(LaunchPlan, Submission),
    /// Waits for a launch as planned, which it began to submit at a time.
    Awaited(LaunchPlan, u64),
    /// Has submitted a launch.
    Launched,
    /// Synchronizes.
    Sync,
    /// Returns from a synchronisation.
    Synced,
}

impl World {
    /// Wakes the process whose wait is over.
    pub(super) fn wake(&mut self, gpu: usize, context: usize) {
        let (cpu, now) = (self.cpu, self.now);
        let is_waiting = |process: &&mut Process| (process.gpu, process.context) == (gpu, context);
        let Some(process) = self.processes.iter_mut().find(is_waiting) else { return };
        let quota = self.quotas[process.container].as_mut();
        process.wake = cpu.work(quota, now, cpu.sync, &mut self.random);
    }

    pub(super) fn act(&mut self, at: usize) {
        match core::mem::replace(&mut self.processes[at].phase, Phase::Launch) {
            Phase::Launch => self.launch(at),
            Phase::Admitted(plan) => self.submit(at, Some(plan)),
            Phase::Submitted(plan, submission) => {
                self.report(at, plan, submission);
                self.launched(at);
            }
            Phase::Awaited(plan, since) => {
                let process = &mut self.processes[at];
                let limiter = &self.containers[process.container].1;
                let wall_ns = self.now - since;
                limiter.timed(&mut process.limiter, process.slot, plan, wall_ns, self.now);
                self.launched(at);
            }
            Phase::Launched => self.launched(at),
            Phase::Sync => self.sync(at),
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
            Pattern::Sync { gap } if gap > 0 => {
                let quota = self.quotas[process.container].as_mut();
                process.wake = self.cpu.work(quota, now, gap, &mut self.random);
            }
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
        let has_no_events = program.refuses_events && pair.is_some();
        let awaits = has_no_events && ContainerLimiter::may_time(&process.limiter, self.now);
        if let Some(plan) = plan.filter(|_| awaits && gpu.queued(context) > 0) {
            process.phase = Phase::Admitted(plan);
            process.wake = u64::MAX;
            gpu.wait_for(context, 0);
            return;
        }
        let pair = pair.filter(|_| !has_no_events);
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
        if let Some(plan) = plan.filter(|_| awaits) {
            process.phase = Phase::Awaited(plan, self.now);
            process.wake = u64::MAX;
            gpu.wait_for(context, 0);
            return;
        }
        if let Some(plan) = plan.filter(|_| has_no_events) {
            ContainerLimiter::unmeasured(&mut process.limiter, plan);
        }
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
        process.phase = Phase::Sync;
        let work = self.containers[process.container].0.program.before_sync;
        if work == 0 {
            return self.sync(at);
        }
        let quota = self.quotas[process.container].as_mut();
        process.wake = self.cpu.work(quota, now, work, &mut self.random);
    }

    fn sync(&mut self, at: usize) {
        let process = &mut self.processes[at];
        process.phase = Phase::Synced;
        process.wake = u64::MAX;
        let (gpu, context) = (process.gpu, process.context);
        if self.gpus[gpu].queued(context) == 0 {
            return self.wake(gpu, context);
        }
        self.gpus[gpu].wait_for(context, 0);
    }
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
