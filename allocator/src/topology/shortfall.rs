//! Explanation why no set of devices meets the requirements.

use tessera_api::config::TopologyScope;

use super::request::SetRequest;
use super::{DeviceSet, LinkMatrix, TopologyPreferences};

/// Maximum number of steps to find a largest group; beyond it the largest one found counts.
const STEPS: u32 = 10_000;

/// Comparison of the candidates with the required topology.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortfall {
    /// Number of requested devices.
    pub count: usize,
    /// Number of candidates.
    pub candidates: usize,
    /// Groups per required scope.
    pub scopes: Vec<ScopeShortfall>,
    /// Maximum number of devices that share all required scopes.
    pub largest_group: usize,
}

/// Groups of candidates that share one scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeShortfall {
    /// Topology scope.
    pub scope: TopologyScope,
    /// Sizes of the groups, largest first. If groups overlap (an incomplete NVLink mesh), the
    /// largest is removed first, then the largest of the rest.
    pub groups: Vec<usize>,
}

impl Shortfall {
    pub(super) fn of(matrix: &LinkMatrix, request: &SetRequest) -> Self {
        let candidates = request.candidates & matrix.devices();
        let scope = |scope| ScopeShortfall {
            scope,
            groups: groups(matrix, TopologyPreferences::default().require(scope), candidates),
        };
        Self {
            count: request.count,
            candidates: candidates.len(),
            scopes: request.preferences.required().map(scope).collect(),
            largest_group: largest(matrix, request.preferences, candidates).len(),
        }
    }
}

fn groups(
    matrix: &LinkMatrix,
    preferences: TopologyPreferences,
    mut left: DeviceSet,
) -> Vec<usize> {
    let mut sizes = Vec::new();
    while !left.is_empty() {
        let group = largest(matrix, preferences, left);
        sizes.push(group.len());
        left = left - group;
    }
    sizes
}

/// Returns the largest set that meets the requirements; of several the one with the lowest
/// positions.
fn largest(matrix: &LinkMatrix, preferences: TopologyPreferences, among: DeviceSet) -> DeviceSet {
    let mut search = Search { matrix, preferences, best: DeviceSet::EMPTY, steps: 0 };
    search.extend(DeviceSet::EMPTY, among);
    search.best
}

struct Search<'m> {
    matrix: &'m LinkMatrix,
    preferences: TopologyPreferences,
    best: DeviceSet,
    steps: u32,
}

impl Search<'_> {
    fn extend(&mut self, set: DeviceSet, mut left: DeviceSet) {
        if set.len() > self.best.len() {
            self.best = set;
        }
        while let Some(device) = left.iter().next() {
            self.steps += 1;
            if set.len() + left.len() <= self.best.len() || self.steps > STEPS {
                return;
            }
            left = left - DeviceSet::one(device);
            self.extend(
                set | DeviceSet::one(device),
                self.preferences.companions(self.matrix, device, left),
            );
        }
    }
}
