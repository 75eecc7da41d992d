//! What stands between a launch and the GPU.

use tessera_intercept_abi::ComputePolicy;
use tessera_intercept_limiter::compute::{
    Asked, ComputePage, ComputeSlot, Decision, Key, MARKERS, Marker, Meter, Plan, Published,
    PublishedPage, Rate, Surroundings, Till, Timer, running_of,
};

use crate::gpu::Gpu;
use crate::others::{Aimd, Hami};

/// Whose limiter holds a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limiter {
    /// Ours.
    Tessera(ComputePolicy),
    /// A model of HAMi-core's: tokens are blocks, fed back every 120 ms from NVML's utilisation.
    Hami,
    /// A model of vgpu-manager's: additive increase, multiplicative decrease.
    Aimd,
    /// None, and nothing is measured.
    Nothing,
}

/// What the processes of a container share.
#[derive(Debug)]
pub struct Enforced {
    pub(crate) limiter: Limiter,
    pub(crate) share: Rate,
    pub(crate) page: ComputePage,
    pub(crate) slots: Vec<ComputeSlot>,
    pub(crate) published: PublishedPage,
    pub(crate) aimd: Aimd,
    pub(crate) percent: u32,
    pub(crate) slice_ns: u64,
}

/// What each process has for itself.
#[derive(Debug)]
pub(crate) enum Own {
    /// And since when its launch waits.
    Tessera(Box<(Till, Meter, Option<u64>)>),
    Hami(Hami),
    Aimd,
    Nothing,
}

/// Whether a launch may go.
#[derive(Debug)]
pub(crate) enum Verdict {
    Go(Option<(u16, u16)>),
    WaitUntil(u64),
}

/// What [`Meter`] asks of events, answered by the GPU.
pub(crate) struct Events<'a> {
    pub(crate) gpu: &'a Gpu,
    pub(crate) context: usize,
}

impl Timer for Events<'_> {
    fn is_done(&mut self, marker: Marker) -> bool {
        self.gpu.passed(self.context, marker.0).is_some()
    }

    fn elapsed_ns(&mut self, from: Marker, to: Marker) -> Option<i64> {
        let (from, to) =
            (self.gpu.passed(self.context, from.0)?, self.gpu.passed(self.context, to.0)?);
        Some(to as i64 - from as i64 - self.gpu.event_cost() as i64)
    }
}

impl Enforced {
    pub(crate) fn new(limiter: Limiter, percent: u32, processes: usize, slice_ns: u64) -> Self {
        Self {
            limiter,
            share: Rate::from_percent(percent),
            page: ComputePage::default(),
            slots: (0..processes).map(|_| ComputeSlot::default()).collect(),
            published: PublishedPage::default(),
            aimd: Aimd::default(),
            percent,
            slice_ns,
        }
    }

    pub(crate) fn own(&self) -> Own {
        match self.limiter {
            Limiter::Tessera(_) => Own::Tessera(Box::default()),
            Limiter::Hami => Own::Hami(Hami::default()),
            Limiter::Aimd => Own::Aimd,
            Limiter::Nothing => Own::Nothing,
        }
    }

    /// Events that a context needs.
    pub(crate) const fn events(&self) -> usize {
        MARKERS
    }

    fn around<'a>(&'a self, till: &'a Till, slot: usize, now: u64) -> Surroundings<'a> {
        let siblings =
            self.slots.iter().enumerate().filter(|(at, _)| *at != slot).map(|(_, slot)| slot);
        Surroundings {
            till,
            page: &self.page,
            slot: &self.slots[slot],
            siblings: running_of(siblings, now),
            published: Published::read(&self.published, now),
            policy: match self.limiter {
                Limiter::Tessera(policy) => policy,
                _ => ComputePolicy::None,
            },
            share: self.share,
            slice_ns: self.slice_ns,
        }
    }

    pub(crate) fn ask(
        &mut self,
        own: &mut Own,
        slot: usize,
        key: Key,
        events: &mut Events<'_>,
        now: u64,
    ) -> Verdict {
        match own {
            Own::Tessera(own) => {
                let (till, meter, waits) = &mut **own;
                if till.spend(key).is_some() {
                    return Verdict::Go(None);
                }
                let asked = Asked { since: *waits.get_or_insert(now), now };
                match meter.admit(key, events.context, &self.around(till, slot, now), events, asked)
                {
                    Decision::Go(Plan { between, .. }) => {
                        *waits = None;
                        Verdict::Go(between.map(|(before, behind)| (before.0, behind.0)))
                    }
                    Decision::Wait(waiting) => Verdict::WaitUntil(waiting.until_ns),
                }
            }
            Own::Hami(hami) => hami.ask(now),
            Own::Aimd => self.aimd.ask(now),
            Own::Nothing => Verdict::Go(None),
        }
    }

    /// A synchronisation returned.
    pub(crate) fn synced(&self, own: &mut Own, slot: usize, gpu: &Gpu, context: usize, now: u64) {
        if let Own::Tessera(own) = own {
            let (till, meter, _) = &mut **own;
            meter.synced(&self.around(till, slot, now), &mut Events { gpu, context }, now);
        }
    }
}
