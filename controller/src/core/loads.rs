//! Age of the measured loads: one that is not renewed is forgotten, because it says nothing about
//! the present.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tessera_api::load::NodeLoad;
use tessera_api::names::NodeName;
use tessera_index::Index;

use super::clock::Moment;

/// Age at which a load is forgotten: three intervals of sampling.
const MAX_AGE: Duration = Duration::from_secs(90);

/// Times at which the known loads arrived.
#[derive(Debug, Default)]
pub(super) struct LoadAges {
    of_node: BTreeMap<NodeName, Moment>,
    oldest: BTreeSet<(Moment, NodeName)>,
}

impl LoadAges {
    /// Takes over the load of a node, which arrived at `at`.
    pub(super) fn apply(&mut self, index: &mut Index, node: NodeName, load: &NodeLoad, at: Moment) {
        index.apply_load(&node, load);
        if let Some(before) = self.of_node.insert(node.clone(), at) {
            self.oldest.remove(&(before, node.clone()));
        }
        self.oldest.insert((at, node));
    }

    /// Forgets the loads that are too old.
    pub(super) fn expire(&mut self, index: &mut Index, now: Moment) {
        while let Some((at, _)) = self.oldest.first()
            && *at + MAX_AGE <= now
            && let Some((_, node)) = self.oldest.pop_first()
        {
            self.of_node.remove(&node);
            index.forget_load(&node);
        }
    }

    /// Returns the number of nodes whose load is known.
    pub(super) fn count(&self) -> usize {
        self.of_node.len()
    }
}
