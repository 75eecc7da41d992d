//! Why no set of devices holds what is required.

use tessera_api::config::TopologyScope;

use super::chooser::SetRequest;
use super::{DeviceSet, LinkMatrix, Wishes};

/// How many devices a largest group is searched with; beyond it the largest found so far counts.
const STEPS: u32 = 10_000;

/// What the candidates offer of what is required.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortfall {
    /// How many devices are asked for.
    pub count: usize,
    /// How many may be taken.
    pub candidates: usize,
    /// Each required scope for itself.
    pub scopes: Vec<ScopeShortfall>,
    /// How many devices share all of what is required, at most.
    pub together: usize,
}

/// The candidates in groups that share one scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeShortfall {
    /// The scope.
    pub scope: TopologyScope,
    /// Sizes of the groups, the largest first. Where groups overlap (an NVLink mesh that is not
    /// complete), the largest is taken out first, then the largest of what is left.
    pub groups: Vec<usize>,
}

impl Shortfall {
    pub(super) fn of(matrix: &LinkMatrix, request: &SetRequest) -> Self {
        let candidates = request.candidates & matrix.devices();
        let scope = |scope| ScopeShortfall {
            scope,
            groups: groups(matrix, Wishes::default().require(scope), candidates),
        };
        Self {
            count: request.count,
            candidates: candidates.len(),
            scopes: request.wishes.required().map(scope).collect(),
            together: largest(matrix, request.wishes, candidates).len(),
        }
    }
}

fn groups(matrix: &LinkMatrix, wishes: Wishes, mut left: DeviceSet) -> Vec<usize> {
    let mut sizes = Vec::new();
    while !left.is_empty() {
        let group = largest(matrix, wishes, left);
        sizes.push(group.len());
        left = left - group;
    }
    sizes
}

/// The largest set that holds what is required; of several the one with the lowest positions.
fn largest(matrix: &LinkMatrix, wishes: Wishes, among: DeviceSet) -> DeviceSet {
    let mut search = Search { matrix, wishes, best: DeviceSet::EMPTY, steps: 0 };
    search.extend(DeviceSet::EMPTY, among);
    search.best
}

struct Search<'m> {
    matrix: &'m LinkMatrix,
    wishes: Wishes,
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
                self.wishes.companions(self.matrix, device, left),
            );
        }
    }
}
