//! Topology requirements and preferences of a request.

use tessera_api::config::{TopologyMode, TopologyScope, TopologyTerm};

use super::{DeviceSet, LinkMatrix};

/// Required and preferred topology scopes of a request. Without any, the best score decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TopologyPreferences {
    required: [bool; TopologyScope::ALL.len()],
    preferred: [bool; TopologyScope::ALL.len()],
}

impl TopologyPreferences {
    /// Creates the preferences from the terms of a configuration.
    pub fn new(terms: &[TopologyTerm]) -> Self {
        terms.iter().fold(Self::default(), |preferences, term| match term.mode {
            TopologyMode::Require => preferences.require(term.scope),
            TopologyMode::Prefer => preferences.prefer(term.scope),
        })
    }

    /// Requires every two devices to share `scope`: an NVLink, a PCIe root complex or a NUMA node.
    #[must_use]
    pub fn require(mut self, scope: TopologyScope) -> Self {
        self.required[scope as usize] = true;
        self
    }

    /// Prefers sets with the most pairs that share `scope`; it takes precedence over the score. For
    /// NVLink it has no effect, since the score measures NVLinks already.
    #[must_use]
    pub fn prefer(mut self, scope: TopologyScope) -> Self {
        self.preferred[scope as usize] = true;
        self
    }

    /// Returns the required scopes.
    pub fn required(&self) -> impl Iterator<Item = TopologyScope> {
        TopologyScope::ALL.iter().copied().filter(|scope| self.required[*scope as usize])
    }

    fn counted(&self) -> impl Iterator<Item = TopologyScope> {
        let counts = |scope: &TopologyScope| {
            *scope != TopologyScope::NvLink && self.preferred[*scope as usize]
        };
        TopologyScope::ALL.iter().copied().filter(counts)
    }

    /// Returns the devices of `among` that can be in one set with the device.
    pub(super) fn companions(
        &self,
        matrix: &LinkMatrix,
        device: usize,
        among: DeviceSet,
    ) -> DeviceSet {
        self.required().fold(among - DeviceSet::one(device), |set, scope| {
            set & matrix.peers_in_scope(scope, device)
        })
    }

    /// Returns the number of pairs that share preferred scopes, counted per scope.
    pub(super) fn preferred_pairs(&self, matrix: &LinkMatrix, set: DeviceSet) -> u32 {
        self.counted().map(|scope| matrix.pairs_sharing(scope, set) as u32).sum()
    }

    /// Returns the number of such pairs of one device with a set.
    pub(super) fn preferred_with(
        &self,
        matrix: &LinkMatrix,
        device: usize,
        with: DeviceSet,
    ) -> u32 {
        self.counted().map(|scope| (matrix.peers_in_scope(scope, device) & with).len() as u32).sum()
    }
}
