//! Arbitration by the host of the GPU time that containers leave unused.

use tessera_intercept_abi::ComputePolicy;

use crate::compute::{Contention, Entitlement, Gain, Published, Rate};

/// Entitlement of a container on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tenant {
    /// Entitlement by its grant.
    pub entitlement: Entitlement,
    /// The most that it gets under [`ComputePolicy::Balance`].
    pub limit: Rate,
    /// Order in which containers get spare time, the lowest number first.
    pub priority: u8,
}

impl Tenant {
    /// Returns its guaranteed part of the GPU's time, in hundredths of a percent.
    fn guaranteed(&self) -> u64 {
        let Entitlement { share, is_guaranteed, .. } = self.entitlement;
        if is_guaranteed { share.hundredths().into() } else { 0 }
    }

    /// Returns true if it may be held to less than the whole GPU while others have work.
    fn is_limited_beside_others(&self) -> bool {
        let is_balanced = self.entitlement.policy == ComputePolicy::Balance;
        self.is_limited_alone() || is_balanced && self.entitlement.share < Rate::FULL
    }

    /// Returns true if it is held to less than the whole GPU in any case.
    fn is_limited_alone(&self) -> bool {
        match self.entitlement.policy {
            ComputePolicy::None => false,
            ComputePolicy::Fixed => self.entitlement.share < Rate::FULL,
            ComputePolicy::Balance => self.limit.max(self.entitlement.share) < Rate::FULL,
        }
    }
}

/// Returns true if launches of a container must be charged and measured: it is limited, or the
/// limit of another container on the GPU depends on its use, or they are guaranteed more than the
/// GPU together.
#[must_use]
pub fn needs_metering<'a>(
    own: &Tenant,
    mut others: impl Iterator<Item = &'a Tenant> + Clone,
) -> bool {
    if own.guaranteed() + others.clone().map(Tenant::guaranteed).sum::<u64>() > WHOLE {
        return true;
    }
    match own.entitlement.policy {
        ComputePolicy::Balance if own.entitlement.share < Rate::FULL => {
            own.is_limited_alone() || others.next().is_some()
        }
        _ => own.is_limited_alone() || others.any(Tenant::is_limited_beside_others),
    }
}

/// Values that the host reads from a container's ledger; sums since the ledger was created.
#[derive(Debug, Clone, Copy)]
pub struct Observation {
    /// The container.
    pub tenant: Tenant,
    /// Wall ns in which its processes had work, added up, those under way included.
    pub busy_ns: u64,
    /// GPU-ns charged.
    pub gpu_ns: u64,
    /// The correction of what is charged.
    pub gain: Gain,
    /// True if a process waits for tokens, or did in this interval.
    pub waited: bool,
}

/// Divides one GPU among at most `N` containers, each of which keeps its index.
#[derive(Debug)]
pub struct Arbiter<const N: usize> {
    last: [Option<Last>; N],
    /// By container: busy time of all others, as published.
    others_busy_ns: [u64; N],
    at: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Last {
    busy_ns: u64,
    gpu_ns: u64,
}

/// Use by one container in an interval; parts of a GPU in hundredths of a percent.
#[derive(Debug, Clone, Copy, Default)]
struct Turn {
    busy_ns: u64,
    entitled: u64,
    wants: u64,
    gets: u64,
    limit: u64,
}

const WHOLE: u64 = 10_000;
/// Less than this counts as idle.
const IDLE: u64 = 100;
/// The most processes of a container that count as contention at the same time: a tenant can write
/// any number into its ledger, and other containers would be charged less for it.
const MOST_PROCESSES: u64 = 16;
/// A container with work for this part of the time would have used more.
const ALWAYS: u64 = 9_000;

impl<const N: usize> Default for Arbiter<N> {
    fn default() -> Self {
        Self { last: [None; N], others_busy_ns: [0; N], at: 0 }
    }
}

impl<const N: usize> Arbiter<N> {
    /// Continues from the sum that was published to a container before: sums never decrease.
    pub fn resume(&mut self, at: usize, others_busy_ns: u64) {
        if let Some(place) = self.others_busy_ns.get_mut(at) {
            *place = others_busy_ns;
        }
    }

    /// Returns the values to publish to each container of the GPU (`None`: no such container).
    ///
    /// Each container gets its demand up to its entitlement. Spare time goes to containers with
    /// more demand, by priority, and within a priority in proportion to their shares. Containers
    /// without a policy are entitled to the time that no other container is entitled to.
    ///
    /// If containers with work are guaranteed more than the GPU together, their guarantees are
    /// scaled down in proportion. One that wants less than its part leaves the rest to the others.
    pub fn step(&mut self, now: u64, seen: &[Option<Observation>; N]) -> [Option<Published>; N] {
        let wall = now.saturating_sub(self.at).max(1);
        self.at = now;
        let mut turns = [Turn::default(); N];
        for ((turn, seen), last) in turns.iter_mut().zip(seen).zip(&self.last) {
            if let (Some(seen), Some(last)) = (seen, last) {
                *turn = observe(seen, last, wall);
            }
        }
        entitle_the_rest(seen, &mut turns);
        let scale = scale_down(seen, &mut turns);
        for turn in &mut turns {
            turn.gets = turn.wants.min(turn.entitled);
        }
        let all_busy: u64 = turns.iter().map(|turn| turn.busy_ns).sum();
        core::array::from_fn(|at| {
            let (last, turn) = (self.last.get_mut(at)?, turns.get(at)?);
            // Another container may get the place of one that was removed.
            let seen_now = seen.get(at)?.as_ref();
            *last = seen_now.map(|seen| Last { busy_ns: seen.busy_ns, gpu_ns: seen.gpu_ns });
            seen_now?;
            let others_busy = all_busy - turn.busy_ns;
            let others_busy_ns = self.others_busy_ns.get_mut(at)?;
            *others_busy_ns = others_busy_ns.saturating_add(others_busy);
            let rate = (turn.entitled + extra(at, seen, &turns)).min(turn.limit);
            Some(Published {
                rate: Rate::new(u16::try_from(rate).unwrap_or(u16::MAX)),
                others: Contention::over(others_busy, wall),
                others_busy_ns: *others_busy_ns,
                stamp_ms: (now / 1_000_000) as u32,
                is_metered: true,
                scale,
            })
        })
    }
}

/// Returns the use by a container since the last step.
fn observe(seen: &Observation, last: &Last, wall: u64) -> Turn {
    let part = |ns: u64| ns.saturating_mul(WHOLE) / wall;
    let busy_ns =
        seen.busy_ns.saturating_sub(last.busy_ns).min(wall.saturating_mul(MOST_PROCESSES));
    let used = part(seen.gain.correct(seen.gpu_ns.saturating_sub(last.gpu_ns)));
    let wants = match part(busy_ns) {
        ALWAYS.. => WHOLE,
        _ if seen.waited => WHOLE,
        ..IDLE => 0,
        _ => (used + used / 10 + IDLE).min(WHOLE),
    };
    let share = u64::from(seen.tenant.entitlement.share.hundredths());
    match seen.tenant.entitlement.policy {
        ComputePolicy::None => Turn { busy_ns, wants, entitled: 0, gets: 0, limit: WHOLE },
        ComputePolicy::Fixed => {
            Turn { busy_ns, wants: wants.min(share), entitled: share, gets: 0, limit: WHOLE }
        }
        ComputePolicy::Balance => {
            let limit = u64::from(seen.tenant.limit.hundredths()).max(share);
            Turn { busy_ns, wants: wants.min(limit), entitled: share, gets: 0, limit }
        }
    }
}

/// Entitles containers without a policy to the time that no other is entitled to, in equal parts.
fn entitle_the_rest<const N: usize>(seen: &[Option<Observation>; N], turns: &mut [Turn; N]) {
    let rest = WHOLE.saturating_sub(turns.iter().map(|turn| turn.entitled).sum());
    let without = |seen: &Option<Observation>| {
        seen.is_some_and(|seen| seen.tenant.entitlement.policy == ComputePolicy::None)
    };
    let count = seen.iter().filter(|seen| without(seen)).count() as u64;
    for (turn, _) in turns.iter_mut().zip(seen).filter(|(_, seen)| without(seen)) {
        turn.entitled = rest / count.max(1);
    }
}

/// Scales guaranteed entitlements down so that what containers use of them fits on the GPU. Returns
/// the scale.
fn scale_down<const N: usize>(seen: &[Option<Observation>; N], turns: &mut [Turn; N]) -> Rate {
    let is_guaranteed =
        |seen: &Option<Observation>| seen.is_some_and(|seen| seen.tenant.guaranteed() > 0);
    let mut active = [false; N];
    for ((active, turn), seen) in active.iter_mut().zip(turns.iter()).zip(seen) {
        *active = turn.wants > 0 && is_guaranteed(seen);
    }
    // Containers that want less than their part of what is left get all that they want.
    let (mut left, mut scale) = (WHOLE, WHOLE);
    loop {
        let rest = || turns.iter().enumerate().filter(|(at, _)| active.get(*at) == Some(&true));
        let entitled: u64 = rest().map(|(_, turn)| turn.entitled).sum();
        if entitled == 0 {
            break;
        }
        let is_served = |turn: &Turn| turn.wants * entitled <= left * turn.entitled;
        match rest().find(|(_, turn)| is_served(turn)).map(|(at, turn)| (at, turn.wants)) {
            Some((at, wants)) => {
                left = left.saturating_sub(wants);
                if let Some(place) = active.get_mut(at) {
                    *place = false;
                }
            }
            None => {
                scale = (left * WHOLE / entitled).min(WHOLE);
                break;
            }
        }
    }
    for (turn, _) in turns.iter_mut().zip(seen).filter(|(_, seen)| is_guaranteed(seen)) {
        turn.entitled = turn.entitled * scale / WHOLE;
    }
    Rate::new(u16::try_from(scale).unwrap_or(u16::MAX))
}

/// Returns the spare time of a container beyond its entitlement: all of it if no other has more
/// demand, otherwise the part that containers of higher priority leave, in proportion to the
/// shares. Time that the limit of another container excludes goes to the rest.
fn extra<const N: usize>(at: usize, seen: &[Option<Observation>; N], turns: &[Turn; N]) -> u64 {
    let (Some(Some(own)), Some(turn)) = (seen.get(at), turns.get(at)) else { return 0 };
    let others = || turns.iter().zip(seen).enumerate().filter(|(other, _)| *other != at);
    let taken: u64 = others().map(|(_, (turn, _))| turn.gets).sum();
    let mut left = WHOLE.saturating_sub(taken).saturating_sub(turn.entitled);
    let wanting = || others().filter(|(_, (turn, _))| turn.wants > turn.entitled);
    let priority = |seen: &Option<Observation>| seen.map(|seen| seen.tenant.priority);
    for (_, (rival, _)) in
        wanting().filter(|(_, (_, seen))| priority(seen) < Some(own.tenant.priority))
    {
        left = left.saturating_sub(rival.limit - rival.entitled.min(rival.limit));
    }
    let equal = || wanting().filter(|(_, (_, seen))| priority(seen) == Some(own.tenant.priority));
    // A container at its limit leaves the rest to others, which may then reach their limits too.
    let mut is_full = [false; N];
    loop {
        let contending = || equal().filter(|(other, _)| is_full.get(*other) != Some(&true));
        let entitled: u64 = contending().map(|(_, (rival, _))| rival.entitled.max(1)).sum();
        let weights = (entitled + turn.entitled).max(1);
        let room = |rival: &Turn| rival.limit.saturating_sub(rival.entitled);
        let fills = |rival: &Turn| room(rival) * weights <= left * rival.entitled.max(1);
        let Some((full, (rival, _))) = contending().find(|(_, (rival, _))| fills(rival)) else {
            return left * turn.entitled.max(1) / weights;
        };
        left = left.saturating_sub(room(rival));
        if let Some(place) = is_full.get_mut(full) {
            *place = true;
        }
    }
}
