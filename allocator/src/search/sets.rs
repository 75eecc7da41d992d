//! Search with topology: tries whole sets of devices of one machine, the best first.
//!
//! It continues until the remaining requests fit too.

use std::collections::BTreeSet;

use super::outcome::MAX_RESULTS;
use super::run::{Progress, Run, Stop};
use super::state::Target;
use crate::cluster::{MachineTopology, MatrixPositions, ReachableDevices};
use crate::topology::{DeviceSet, SetRequest, TopologyPreferences};

/// Number of sets after which devices are tried individually, unless a topology is required.
const MAX_SETS: usize = 64;

impl Run<'_> {
    /// Returns the set size of an alternative; `None` if its devices are chosen individually.
    ///
    /// Where an error is possible, the order is upstream's, and a required topology is tested for
    /// each added device.
    pub(super) fn set_size(&self, index: usize, count: u64) -> Option<usize> {
        let alternative = &self.search.shape.alternatives[index];
        let resolved = alternative.resolved.as_ref().ok()?;
        self.search.reachable.matrix_positions.as_ref()?;
        let matters = resolved.topology != TopologyPreferences::default()
            || resolved.device.uses_forecast()
                && self.usable(index, 0).all(|i| self.state.is_unused(i));
        let count =
            usize::try_from(count).ok().filter(|count| (2..=DeviceSet::MAX).contains(count))?;
        (self.is_plain && matters && !resolved.device.keeps_order()).then_some(count)
    }

    /// Chooses all devices of the request at once.
    pub(super) fn choose_sets(&mut self, target: Target, count: usize) -> Progress {
        if count > MAX_RESULTS - self.state.results(target.claim) {
            return Ok(false);
        }
        let reachable = self.search.reachable;
        let Some(positions) = &reachable.matrix_positions else {
            return self.choose_individually(target, count as u64);
        };
        let usable: Vec<usize> = self.usable(target.index, 0).collect();
        for pool in 0..reachable.pools.len() as u32 {
            let Some(machine) = positions.machine(pool) else { continue };
            let members: Vec<usize> =
                in_pool(reachable, positions, pool, usable.iter().copied()).collect();
            if self.choose_sets_in_pool(target, count, pool, machine, &members)? {
                return Ok(true);
            }
            if members.len() == usable.len() {
                return Ok(false);
            }
        }
        // Devices of different machines share no topology scope.
        if self.requires_topology(target.index) {
            return Ok(false);
        }
        self.choose_individually(target, count as u64)
    }

    /// Chooses a set in one pool, of these usable candidates.
    fn choose_sets_in_pool(
        &mut self,
        target: Target,
        count: usize,
        pool: u32,
        machine: &MachineTopology,
        usable: &[usize],
    ) -> Progress {
        let Ok(resolved) = &self.search.shape.alternatives[target.index].resolved else {
            return Ok(false);
        };
        let reachable = self.search.reachable;
        let Some(positions) = &reachable.matrix_positions else { return Ok(false) };
        let all = in_pool(reachable, positions, pool, 0..reachable.candidates.len());
        let request = SetRequest {
            count,
            candidates: positions.set(usable.iter().copied()),
            free: positions.set(all.filter(|&i| self.state.is_unused(i))),
            preferences: resolved.topology,
        };
        let mut sets = machine.chooser().sets(&request);
        let mut failed = BTreeSet::new();
        let mut tried = 0;
        while let Some(choice) = sets.next(self.search.steps).map_err(|_| Stop::OutOfSteps)? {
            // The order was a preference only, and the individual search prunes more.
            if tried == MAX_SETS && !self.requires_topology(target.index) {
                return self.choose_individually(target, count as u64);
            }
            tried += 1;
            let is_in = |i: &usize| {
                positions.get(*i).is_some_and(|position| choice.devices.contains(position))
            };
            let devices: Vec<usize> = usable.iter().copied().filter(is_in).collect();
            let signature = self.symmetry.as_ref().map(|symmetry| symmetry.signature(&devices));
            if signature.is_some_and(|signature| failed.contains(&signature)) {
                continue;
            }
            if self.take_set(target, &devices, 0)? {
                return Ok(true);
            }
            failed.extend(signature);
        }
        Ok(false)
    }

    /// Takes the devices from the `n`th on, then serves the remaining requests.
    fn take_set(&mut self, target: Target, devices: &[usize], n: usize) -> Progress {
        let Some(&i) = devices.get(n) else {
            return self.request(target.claim, target.request + 1);
        };
        if !self.try_take(target, i)? {
            return Ok(false);
        }
        let done = self.take_set(target, devices, n + 1);
        if !matches!(done, Ok(true)) {
            self.undo_take(target, i);
        }
        done
    }

    pub(super) fn requires_topology(&self, index: usize) -> bool {
        self.search.shape.alternatives[index].requires_topology()
    }

    /// Returns true if the candidate shares the required scopes with all devices of the request so
    /// far.
    pub(super) fn satisfies_topology(&self, target: Target, i: usize) -> bool {
        if !self.requires_topology(target.index) {
            return true;
        }
        let (reachable, shape) = (self.search.reachable, self.search.shape);
        let Ok(resolved) = &shape.alternatives[target.index].resolved else { return true };
        let of_request = |chosen: &&crate::shape::Chosen| chosen.request == target.request;
        let mut others = self.state.chosen(target.claim).iter().rev().take_while(of_request);
        others.all(|other| share_scopes(reachable, &resolved.topology, i, other.candidate))
    }
}

/// Returns true if two candidates share the required scopes.
fn share_scopes(
    reachable: &ReachableDevices,
    preferences: &TopologyPreferences,
    one: usize,
    other: usize,
) -> bool {
    let Some(positions) = &reachable.matrix_positions else { return false };
    let pool = reachable.candidates[one].pool;
    let position = |i: usize| positions.get(i).filter(|_| reachable.candidates[i].pool == pool);
    let pair = position(one).zip(position(other)).zip(positions.machine(pool));
    pair.is_some_and(|((one, other), machine)| {
        preferences
            .required()
            .all(|scope| machine.matrix().peers_in_scope(scope, one).contains(other))
    })
}

/// Returns the candidate whose loss reduces later sets least, of equally ranked ones.
///
/// `None` if the topology is unknown.
pub(super) fn least_disruptive(
    reachable: &ReachableDevices,
    equals: impl Iterator<Item = usize>,
) -> Option<usize> {
    let positions = reachable.matrix_positions.as_ref()?;
    let mut equals = equals.peekable();
    let pool = reachable.candidates[*equals.peek()?].pool;
    let equals: Vec<usize> = in_pool(reachable, positions, pool, equals).collect();
    let machine = positions.machine(pool)?;
    let is_free = |&i: &usize| reachable.exclusive[i] == 0 && reachable.shares[i] == 0;
    let all = in_pool(reachable, positions, pool, 0..reachable.candidates.len());
    let request = SetRequest {
        count: 1,
        candidates: positions.set(equals.iter().copied()),
        free: positions.set(all.filter(is_free)),
        preferences: TopologyPreferences::default(),
    };
    let choice = machine.chooser().choose(&request, &mut (DeviceSet::MAX as u64)).ok()??;
    equals
        .into_iter()
        .find(|&i| positions.get(i).is_some_and(|position| choice.devices.contains(position)))
}

/// Returns the size of the largest set of candidates on one machine that share the required scopes.
pub(crate) fn largest_joint_set(
    reachable: &ReachableDevices,
    usable: &[usize],
    preferences: TopologyPreferences,
) -> usize {
    let Some(positions) = &reachable.matrix_positions else { return 0 };
    let of_pool = |pool: u32| {
        let machine = positions.machine(pool)?;
        let candidates = positions.set(in_pool(reachable, positions, pool, usable.iter().copied()));
        let request =
            SetRequest { count: candidates.len(), candidates, free: candidates, preferences };
        Some(machine.chooser().shortfall(&request).largest_group)
    };
    let alone = usize::from(!usable.is_empty());
    (0..reachable.pools.len() as u32).filter_map(of_pool).max().unwrap_or(0).max(alone)
}

/// Returns the candidates in the pool that have a matrix position.
fn in_pool(
    reachable: &ReachableDevices,
    positions: &MatrixPositions,
    pool: u32,
    candidates: impl Iterator<Item = usize>,
) -> impl Iterator<Item = usize> {
    candidates.filter(move |&i| reachable.candidates[i].pool == pool && positions.get(i).is_some())
}
