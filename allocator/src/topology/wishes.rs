//! What a request wishes of how its devices belong together.

use tessera_api::config::{TopologyMode, TopologyScope, TopologyTerm};

use super::{DeviceSet, LinkMatrix};

/// The wishes of a request. Without any, the best score decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Wishes {
    required: [bool; TopologyScope::ALL.len()],
    preferred: [bool; TopologyScope::ALL.len()],
}

impl Wishes {
    /// The wishes that a configuration lists.
    pub fn new(terms: &[TopologyTerm]) -> Self {
        terms.iter().fold(Self::default(), |wishes, term| match term.mode {
            TopologyMode::Require => wishes.require(term.scope),
            TopologyMode::Prefer => wishes.prefer(term.scope),
        })
    }

    /// Every two devices must share `scope`: be joined by NVLink, hang on one PCIe root, be on one
    /// NUMA node.
    #[must_use]
    pub fn require(mut self, scope: TopologyScope) -> Self {
        self.required[scope as usize] = true;
        self
    }

    /// As many pairs as possible should share `scope`, before the score is looked at. For NVLink
    /// the score itself says how well they are joined, so preferring it is what happens without
    /// any wish.
    #[must_use]
    pub fn prefer(mut self, scope: TopologyScope) -> Self {
        self.preferred[scope as usize] = true;
        self
    }

    /// The scopes that are required.
    pub fn required(&self) -> impl Iterator<Item = TopologyScope> {
        TopologyScope::ALL.iter().copied().filter(|scope| self.required[*scope as usize])
    }

    fn counted(&self) -> impl Iterator<Item = TopologyScope> {
        let counts = |scope: &TopologyScope| {
            *scope != TopologyScope::NvLink && self.preferred[*scope as usize]
        };
        TopologyScope::ALL.iter().copied().filter(counts)
    }

    /// With whom of `among` the device can be in one set.
    pub(super) fn companions(
        &self,
        matrix: &LinkMatrix,
        device: usize,
        among: DeviceSet,
    ) -> DeviceSet {
        self.required()
            .fold(among - DeviceSet::one(device), |set, scope| set & matrix.sharing(scope, device))
    }

    /// How many of the pairs share what is preferred, each scope counted.
    pub(super) fn preferred_pairs(&self, matrix: &LinkMatrix, set: DeviceSet) -> u32 {
        self.counted().map(|scope| matrix.pairs_sharing(scope, set) as u32).sum()
    }

    /// The same of one device with each of a set.
    pub(super) fn preferred_with(
        &self,
        matrix: &LinkMatrix,
        device: usize,
        with: DeviceSet,
    ) -> u32 {
        self.counted().map(|scope| (matrix.sharing(scope, device) & with).len() as u32).sum()
    }
}
