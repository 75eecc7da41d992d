//! Cached feasibility of shapes on nodes whose releasable devices are all free.
//!
//! An entry is valid until the node's reachable devices, or allocations that stay, change.

use crate::cluster::{Cluster, NodeEntry, NodeIndex};
use crate::feasibility::{self, FitContext};
use crate::search::SearchOutcome;
use crate::settings::PlanSettings;
use crate::shape::Shape;

/// Cached feasibility per node, for one shape, if the nodes were drained.
#[derive(Debug, Default)]
pub(crate) struct FeasibilityIfDrained {
    nodes: Vec<Option<CachedResult>>,
}

/// Cached result for one node.
#[derive(Debug)]
struct CachedResult {
    /// [`NodeEntry::layout`](crate::cluster::NodeEntry::layout) at the time of the search.
    layout: u64,
    /// [`NodeEntry::stamp`](crate::cluster::NodeEntry::stamp) at the time of the search.
    ///
    /// `None` if the result does not depend on allocations that stay.
    stamp: Option<u64>,
    would_fit: bool,
}

/// Divisor of the step budget of a pod.
const STEP_FRACTION: u64 = 8;

/// Returns the number of steps for one node. A search that needs more ends, and the node counts as
/// infeasible: otherwise one node could use the steps of all others.
pub(crate) fn step_limit(settings: PlanSettings) -> u64 {
    (settings.steps_per_pod / STEP_FRACTION).min(settings.steps_per_plan).max(1)
}

impl CachedResult {
    fn is_current(&self, node: &NodeEntry) -> bool {
        self.layout == node.layout && self.stamp.is_none_or(|stamp| stamp == node.stamp)
    }
}

impl FeasibilityIfDrained {
    /// Returns true if the shape is known not to fit on the drained node.
    pub(crate) fn is_known_infeasible(&self, node: NodeIndex, cluster: &Cluster) -> bool {
        let known = self.nodes.get(node).and_then(Option::as_ref);
        known.is_some_and(|known| !known.would_fit && known.is_current(&cluster.nodes[node]))
    }

    /// Returns true if the shape fits on the drained node; `None` if `steps` ran out. `limit` is
    /// the [`step_limit`].
    pub(crate) fn would_fit(
        &mut self,
        shape: &mut Shape,
        context: &mut FitContext<'_>,
        node: NodeIndex,
        steps: &mut u64,
        limit: u64,
    ) -> Option<bool> {
        let entry = &context.cluster.nodes[node];
        let (layout, stamp) = (entry.layout, entry.stamp);
        self.nodes.resize_with(context.cluster.nodes.len().max(self.nodes.len()), || None);
        if let Some(known) = self.nodes[node].as_ref().filter(|known| known.is_current(entry)) {
            return Some(known.would_fit);
        }
        let given = limit.min(*steps);
        let mut left = given;
        let (outcome, is_final) = feasibility::search_drained(shape, context, node, &mut left);
        *steps -= given - left;
        if matches!(outcome, SearchOutcome::OutOfSteps) && given < limit {
            return None;
        }
        let would_fit = matches!(outcome, SearchOutcome::Found(_));
        self.nodes[node] =
            Some(CachedResult { layout, stamp: (!is_final).then_some(stamp), would_fit });
        Some(would_fit)
    }
}
