//! A node as [`fragmentation`](crate::fragmentation) looks at it.

use std::cell::RefCell;

use super::Ranking;
use crate::fragmentation::{Gpu, GpuMilli, NodeView, Potential, Rise};
use crate::shape::{AlternativeShape, OfferDemand};

/// What is expected of the requests to come, and the CPU of a node and of a pod that might go
/// there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outlook<'a> {
    pub(crate) potential: &'a Potential,
    /// What is left of the node's CPU, in thousandths of a core.
    pub(crate) cpu_left: u64,
    /// What the pod takes of it.
    pub(crate) cpu_asked: u64,
}

/// The GPUs of a node. Devices that nobody can get from us are none.
#[derive(Debug)]
pub(crate) struct Picture {
    gpus: Vec<Gpu>,
    /// Per candidate its place among the GPUs.
    places: Vec<Option<usize>>,
    /// Its potential as it is.
    level: f64,
    /// What taking so much of one GPU of a kind comes to.
    known: RefCell<Vec<(Gpu, GpuMilli, Rise)>>,
}

impl Picture {
    pub(super) fn new(ranking: &Ranking<'_>) -> Self {
        let count = ranking.reach.candidates.len();
        let (mut gpus, mut places) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for candidate in 0..count {
            let compiled = ranking.reach.candidates[candidate].compiled();
            let is_ours = compiled.device.is_ours();
            places.push(is_ours.then_some(gpus.len()));
            if is_ours {
                gpus.push(Gpu { kind: compiled.kind, left: left(ranking, candidate) });
            }
        }
        let outlook = &ranking.outlook;
        let level = outlook.potential.of(&NodeView { cpu_milli: outlook.cpu_left, gpus: &gpus });
        Self { gpus, places, level, known: RefCell::default() }
    }

    /// How much of a GPU the request takes there: the largest of its parts of any capacity.
    pub(super) fn share(
        &self,
        ranking: &Ranking<'_>,
        asked: &AlternativeShape,
        candidate: usize,
    ) -> GpuMilli {
        let candidate = &ranking.reach.candidates[candidate];
        let whole = &ranking.interner.offer(candidate.offer).capacity;
        match asked.on(candidate.offer).map(|answer| &answer.demand) {
            Some(OfferDemand::Takes(demand, _)) if candidate.device().shared => {
                share(demand, whole)
            }
            _ => GpuMilli::WHOLE,
        }
    }

    /// What is left of a candidate.
    pub(super) fn left(&self, candidate: usize) -> GpuMilli {
        self.places[candidate].map_or(GpuMilli::NONE, |place| self.gpus[place].left)
    }

    /// How much the potential rises when so much of these candidates is taken.
    pub(super) fn rise(&self, outlook: &Outlook<'_>, taken: &[(usize, GpuMilli)]) -> Rise {
        let only = match taken {
            [(candidate, share)] => self.places[*candidate].map(|place| (self.gpus[place], *share)),
            _ => None,
        };
        let known = self.known.borrow();
        let found = only.and_then(|only| known.iter().find(|known| (known.0, known.1) == only));
        if let Some((_, _, rise)) = found {
            return *rise;
        }
        drop(known);
        let mut gpus = self.gpus.clone();
        for (candidate, share) in taken {
            if let Some(place) = self.places[*candidate] {
                gpus[place].left = gpus[place].left.less(*share);
            }
        }
        let cpu_milli = outlook.cpu_left.saturating_sub(outlook.cpu_asked);
        let rise = outlook.potential.rise(self.level, &NodeView { cpu_milli, gpus: &gpus });
        self.known.borrow_mut().extend(only.map(|(gpu, share)| (gpu, share, rise)));
        rise
    }
}

/// What is left of a device: the least of what is left of each of its capacities.
fn left(ranking: &Ranking<'_>, candidate: usize) -> GpuMilli {
    let is_held = ranking.holders.get(candidate).is_some_and(|holders| *holders != 0);
    if is_held || ranking.reach.exclusive[candidate] > 0 {
        return GpuMilli::NONE;
    }
    let whole = &ranking.interner.offer(ranking.reach.candidates[candidate].offer).capacity;
    let from = ranking.reach.offset[candidate] as usize;
    let left = &ranking.left[from..from + whole.len()];
    let part =
        |(left, whole): (&i128, &i128)| thousandths((*left).max(0).saturating_mul(1000), *whole);
    let parts = whole
        .iter()
        .zip(left)
        .filter(|(whole, _)| **whole > 0)
        .map(|(whole, left)| part((left, whole)));
    parts.min().map_or(GpuMilli::WHOLE, GpuMilli::new)
}

fn thousandths(milli: i128, whole: i128) -> u32 {
    u32::try_from(milli / whole).unwrap_or(u32::MAX)
}

/// How much of a device a demand is, rounded up.
pub(crate) fn share(demand: &[i128], whole: &[i128]) -> GpuMilli {
    let part = |(asked, whole): (&i128, &i128)| {
        thousandths((*asked).max(0).saturating_mul(1000).saturating_add(whole - 1), *whole)
    };
    let parts = demand.iter().zip(whole).filter(|(_, whole)| **whole > 0).map(part);
    parts.max().map_or(GpuMilli::NONE, GpuMilli::new)
}
