//! Limiters between launches and the GPU.

use core::sync::atomic::{AtomicU64, Ordering};

use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_limiter::compute::{
    ComputePage, ComputeSlot, ComputeView, Entitlement, EventTimer, Gain, Interval, Key, Launch,
    LaunchBudget, LaunchDecision, LaunchPlan, LaunchTime, MARKERS, Marker, Meter, Published,
    PublishedPage, Rate, Submission, is_metered, running_of,
};

use crate::gpu::Gpu;
use crate::nvml::Charged;
use crate::others::{Aimd, Hami};

/// Limiter of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limiter {
    /// Tessera's limiter.
    Tessera(ComputePolicy),
    /// A model of HAMi-core: tokens are blocks, adjusted every 120 ms by NVML's utilisation.
    Hami,
    /// A model of vgpu-manager: additive increase, multiplicative decrease.
    Aimd,
    /// No limiter and no measurement.
    None,
}

impl Limiter {
    /// Returns the entitlement of a container with this limiter and these cores.
    pub(crate) const fn entitlement(self, cores_percent: u32) -> Entitlement {
        match self {
            Self::Tessera(policy) => Entitlement::of_grant(policy, cores_percent),
            _ => Entitlement::UNLIMITED,
        }
    }
}

/// Limiter state that the processes of a container share.
#[derive(Debug)]
pub struct ContainerLimiter {
    pub(crate) limiter: Limiter,
    pub(crate) page: ComputePage,
    pub(crate) slots: Vec<ComputeSlot>,
    pub(crate) published: PublishedPage,
    pub(crate) aimd: Aimd,
    pub(crate) percent: u32,
    pub(crate) slice_ns: u64,
}

/// Limiter state of each process.
#[derive(Debug)]
pub(crate) enum ProcessLimiter {
    /// With the time since which its launch is delayed.
    Tessera(Box<(LaunchBudget, Meter, Option<u64>)>),
    Hami(Hami),
    Aimd,
    None,
}

impl ProcessLimiter {
    /// Returns true if a launch is delayed.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self, Self::Tessera(state) if state.2.is_some())
    }
}

/// Decision about a launch.
#[derive(Debug)]
pub(crate) enum LimiterDecision {
    /// Without a question to the meter, or as planned.
    Admit(Option<LaunchPlan>),
    RetryAt(u64),
}

/// EventTimer of [`Meter`] on top of the simulated GPU.
pub(crate) struct GpuEventTimer<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) context: usize,
}

impl EventTimer for GpuEventTimer<'_> {
    fn query_done(&mut self, marker: Marker) -> bool {
        self.gpu.completed(self.context, marker.0).is_some()
    }

    fn elapsed_ns(&mut self, from: Marker, to: Marker) -> Option<i64> {
        let (from, to) =
            (self.gpu.completed(self.context, from.0)?, self.gpu.completed(self.context, to.0)?);
        Some(to as i64 - from as i64)
    }
}

impl ContainerLimiter {
    pub(crate) fn new(limiter: Limiter, percent: u32, processes: usize, slice_ns: u64) -> Self {
        Self {
            limiter,
            page: ComputePage::default(),
            slots: (0..processes).map(|_| ComputeSlot::default()).collect(),
            published: PublishedPage::default(),
            aimd: Aimd::default(),
            percent,
            slice_ns,
        }
    }

    pub(crate) fn process_limiter(&self) -> ProcessLimiter {
        match self.limiter {
            Limiter::Tessera(_) => ProcessLimiter::Tessera(Box::default()),
            Limiter::Hami => ProcessLimiter::Hami(Hami::default()),
            Limiter::Aimd => ProcessLimiter::Aimd,
            Limiter::None => ProcessLimiter::None,
        }
    }

    /// Returns what its processes were charged.
    pub(crate) fn charged(&self, now: u64) -> Charged {
        let sum = |of: fn(&ComputeSlot) -> &AtomicU64| {
            self.slots.iter().map(|slot| of(slot).load(Ordering::Relaxed)).sum()
        };
        Charged {
            busy_ns: self.slots.iter().map(|slot| slot.busy_until(now)).collect(),
            gpu_ns: sum(|slot| &slot.gpu_ns),
            outstanding_ns: sum(|slot| &slot.outstanding_ns),
            is_late: self
                .slots
                .iter()
                .any(|slot| Interval::is_late(slot.done_by_ns.load(Ordering::Relaxed), now)),
            rate: self
                .limiter
                .entitlement(self.percent)
                .rate(Published::read(&self.published, now))
                .unwrap_or(Rate::FULL),
        }
    }

    /// Returns the number of events that a context needs.
    pub(crate) const fn events(&self) -> usize {
        MARKERS
    }

    fn view<'a>(&'a self, budget: &'a LaunchBudget, slot: usize, now: u64) -> ComputeView<'a> {
        let siblings =
            || self.slots.iter().enumerate().filter(|(at, _)| *at != slot).map(|(_, slot)| slot);
        ComputeView {
            budget,
            page: &self.page,
            slot: &self.slots[slot],
            siblings: running_of(siblings(), now),
            has_siblings: siblings().any(|slot| slot.was_busy(now)),
            published: Published::read(&self.published, now),
            gain: Gain::read(&self.published, now),
            entitlement: self.limiter.entitlement(self.percent),
            slice_ns: self.slice_ns,
        }
    }

    pub(crate) fn decide(
        &mut self,
        process: &mut ProcessLimiter,
        slot: usize,
        (key, stream): (Key, usize),
        events: &mut GpuEventTimer<'_>,
        now: u64,
    ) -> LimiterDecision {
        match process {
            ProcessLimiter::Tessera(state) => {
                if !is_metered(&self.published) {
                    return LimiterDecision::Admit(None);
                }
                let (budget, meter, waits) = &mut **state;
                if budget.charge(key).is_some() {
                    return LimiterDecision::Admit(None);
                }
                let time = LaunchTime { since: *waits.get_or_insert(now), now };
                match meter.admit(
                    Launch { key, context: events.context, stream },
                    &self.view(budget, slot, now),
                    events,
                    time,
                ) {
                    LaunchDecision::Go(plan) => {
                        *waits = None;
                        LimiterDecision::Admit(Some(plan))
                    }
                    LaunchDecision::Wait(waiting) => LimiterDecision::RetryAt(waiting.until_ns),
                }
            }
            ProcessLimiter::Hami(hami) => hami.decide(now),
            ProcessLimiter::Aimd => self.aimd.decide(now),
            ProcessLimiter::None => LimiterDecision::Admit(None),
        }
    }

    /// Observes that a planned launch and its events were submitted.
    pub(crate) fn submitted(
        process: &mut ProcessLimiter,
        plan: LaunchPlan,
        submission: Submission,
    ) {
        if let ProcessLimiter::Tessera(state) = process {
            state.1.submitted(plan, submission);
        }
    }

    /// Returns true if the CPU is to measure a launch without events.
    pub(crate) fn may_time(process: &ProcessLimiter, now: u64) -> bool {
        matches!(process, ProcessLimiter::Tessera(state) if state.1.may_time(now))
    }

    /// Observes that a planned launch stays unmeasured.
    pub(crate) fn unmeasured(process: &mut ProcessLimiter, plan: LaunchPlan) {
        if let ProcessLimiter::Tessera(state) = process {
            state.1.unmeasured(plan);
        }
    }

    /// Observes that a planned launch is done, by the CPU: `wall_ns` after its submission in an
    /// idle stream.
    pub(crate) fn timed(
        &self,
        process: &mut ProcessLimiter,
        slot: usize,
        plan: LaunchPlan,
        wall_ns: u64,
        now: u64,
    ) {
        if let ProcessLimiter::Tessera(state) = process {
            let (budget, meter, _) = &mut **state;
            meter.timed(plan, wall_ns, &self.view(budget, slot, now), now);
        }
    }

    /// Observes the return of a synchronisation.
    pub(crate) fn synced(
        &self,
        process: &mut ProcessLimiter,
        slot: usize,
        gpu: &Gpu,
        context: usize,
        now: u64,
    ) {
        if let ProcessLimiter::Tessera(state) = process {
            let (budget, meter, _) = &mut **state;
            // The hook takes the meter's lock only then.
            if !meter.is_busy() {
                return budget.waited(true);
            }
            meter.synced(&self.view(budget, slot, now), &mut GpuEventTimer { gpu, context }, now);
        }
    }
}
