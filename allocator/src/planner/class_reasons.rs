//! Reasons of a class of pods, kept between plans.

use std::collections::BTreeSet;
use std::sync::Arc;

use tessera_api::reason::NodeReason;

use super::reservation::lacks_held_capacity;
use crate::cluster::{Cluster, NodeIndex, NodeNames};
use crate::explain::ReasonsByNode;
use crate::outcome::RefusalCause;
use crate::shape::Shape;

/// Number of outdated nodes up to which reasons are renewed in one go.
const MAX_FEW_NODES: usize = 256;

/// Reasons why no node is usable.
#[derive(Debug, Default)]
pub(super) struct ClassReasons {
    pub(super) by_node: ReasonsByNode,
    /// Time up to which changed nodes are included in `outdated`; `None` if no node is.
    until: Option<u64>,
    /// Nodes to explain again.
    pub(super) outdated: BTreeSet<NodeIndex>,
    /// Reserved node, with the reason that it has for the class.
    reserved: ReservedReason,
    /// Number of the present state of the reasons; `None` until causes are made of it.
    version: Option<u64>,
    names: Option<Arc<NodeNames>>,
    /// Causes made of these reasons, or of earlier ones.
    causes: Option<KnownCauses>,
}

/// Reserved node, with the reason that it has for a class.
pub(super) type ReservedReason = Option<(NodeIndex, NodeReason)>;

/// Causes of refusals, and the state of the cluster of which they are.
#[derive(Debug)]
struct KnownCauses {
    causes: Vec<Arc<RefusalCause>>,
    /// `None` if nodes were still to be explained.
    at: Option<u64>,
    reserved: ReservedReason,
    lacks_held_capacity: bool,
}

impl ClassReasons {
    /// Returns the causes made last, which may be those of an earlier plan.
    pub(super) fn known_causes(&self) -> Option<&[Arc<RefusalCause>]> {
        self.causes.as_ref().map(|known| &*known.causes)
    }

    /// Returns true if a pod with the causes made last lacks only capacity that others hold.
    pub(super) fn lacks_held_capacity(&self) -> bool {
        self.causes.as_ref().is_some_and(|known| known.lacks_held_capacity)
    }

    /// Returns the number of the state of the reasons; `None` if no causes are made of it.
    pub(super) fn version(&self) -> Option<u64> {
        self.version
    }

    /// Returns true if the causes are those of the present state of the cluster.
    pub(super) fn are_current(
        &self,
        cluster: &Cluster,
        reserved: Option<(NodeIndex, &NodeReason)>,
    ) -> bool {
        self.names.as_ref().is_some_and(|names| Arc::ptr_eq(names, cluster.names()))
            && self.causes.as_ref().is_some_and(|known| {
                let known_reserved = known.reserved.as_ref().map(|(node, reason)| (*node, reason));
                known.at == Some(cluster.last_touch()) && known_reserved == reserved
            })
    }

    /// Collects the nodes that have changed since they were explained.
    pub(super) fn collect_outdated(&mut self, cluster: &Cluster, reserved: ReservedReason) {
        match self.until.and_then(|until| cluster.touched_since(until)) {
            Some(touched) => self.outdated.extend(touched),
            None => self.outdated.extend(0..cluster.nodes.len()),
        }
        self.until = Some(cluster.last_touch());
        if self.reserved != reserved {
            let both = [&self.reserved, &reserved].into_iter().flatten();
            self.outdated.extend(both.map(|(node, _)| *node));
            self.reserved = reserved;
        }
    }

    /// Returns true if so few nodes are outdated that they are explained in one go.
    pub(super) fn are_few_outdated(&self) -> bool {
        self.outdated.len() <= MAX_FEW_NODES
    }

    /// Drops the causes. While some are held, a change of reasons copies those of all nodes.
    pub(super) fn release_causes(&mut self) {
        self.causes = None;
    }

    /// Records that reasons have changed since causes were made of them.
    pub(super) fn note_change(&mut self) {
        self.version = None;
    }

    /// Makes causes of the reasons, unless the known ones are of the same reasons. `new_version`
    /// returns a number that was never used.
    pub(super) fn make_causes(
        &mut self,
        shape: &Shape,
        cluster: &Cluster,
        new_version: impl FnOnce() -> u64,
    ) -> Vec<Arc<RefusalCause>> {
        let names = cluster.names();
        if !self.names.as_ref().is_some_and(|known| Arc::ptr_eq(known, names)) {
            self.names = Some(Arc::clone(names));
            self.version = None;
        }
        let known = self.causes.take().filter(|_| self.version.is_some());
        let version = *self.version.get_or_insert_with(new_version);
        let causes = known.map_or_else(
            || {
                self.by_node.sum_up();
                self.by_node.causes(Some(version), shape, names)
            },
            |known| known.causes,
        );
        let at = self.outdated.is_empty().then(|| cluster.last_touch());
        let reserved = self.reserved.clone();
        let lacks_held_capacity = lacks_held_capacity(causes.iter().map(|cause| &**cause));
        self.causes =
            Some(KnownCauses { causes: causes.clone(), at, reserved, lacks_held_capacity });
        causes
    }

    /// Returns the number of distinct reasons that are kept.
    pub(super) fn len(&self) -> usize {
        self.by_node.len()
    }

    /// Drops the reasons of the nodes, but not what the texts of the causes need. Returns the
    /// number of reasons dropped.
    pub(super) fn reduce_to_counts(&mut self) -> usize {
        for cause in self.causes.iter_mut().flat_map(|known| &mut known.causes) {
            if let RefusalCause::NoFit(explanation) = &**cause {
                *cause = Arc::new(RefusalCause::NoFit(explanation.without_nodes()));
            }
        }
        (self.until, self.version) = (None, None);
        self.outdated.clear();
        std::mem::take(&mut self.by_node).len()
    }
}
