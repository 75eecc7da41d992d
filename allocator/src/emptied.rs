//! Where a shape would fit once everybody has given back what can be given back: found out once for
//! each node, and again for a node that reaches other devices than before.

use crate::cluster::{Cluster, NodeEntry, NodeIndex};
use crate::fits::{self, Ground};
use crate::search::Ended;
use crate::shape::Shape;

/// What is known of nodes for one shape.
#[derive(Debug, Default)]
pub(crate) struct Emptied {
    nodes: Vec<Option<Known>>,
}

/// What is known of a node as long as it stays as it was.
#[derive(Debug)]
struct Known {
    /// As [`NodeEntry::layout`](crate::cluster::NodeEntry::layout).
    layout: u64,
    /// As [`NodeEntry::stamp`](crate::cluster::NodeEntry::stamp), where something stays taken that
    /// others may give back.
    stamp: Option<u64>,
    suffices: bool,
}

/// A search that takes more than this part of the steps is given up: the node does not do.
const PART: u64 = 8;

impl Known {
    fn is_current(&self, node: &NodeEntry) -> bool {
        self.layout == node.layout && self.stamp.is_none_or(|stamp| stamp == node.stamp)
    }
}

impl Emptied {
    /// Whether it is known that the shape would not fit on the node.
    pub(crate) fn is_known_not_to(&self, node: NodeIndex, cluster: &Cluster) -> bool {
        let known = self.nodes.get(node).and_then(Option::as_ref);
        known.is_some_and(|known| !known.suffices && known.is_current(&cluster.nodes[node]))
    }

    /// Whether the shape would fit on the node. None = the steps have not sufficed to tell.
    pub(crate) fn suffices(
        &mut self,
        shape: &mut Shape,
        ground: &mut Ground<'_>,
        node: NodeIndex,
        steps: &mut u64,
        budget: u64,
    ) -> Option<bool> {
        let entry = &ground.cluster.nodes[node];
        let (layout, stamp) = (entry.layout, entry.stamp);
        self.nodes.resize_with(ground.cluster.nodes.len().max(self.nodes.len()), || None);
        if let Some(known) = self.nodes[node].as_ref().filter(|known| known.is_current(entry)) {
            return Some(known.suffices);
        }
        let part = (budget / PART).max(1);
        let given = part.min(*steps);
        let mut left = given;
        let (ended, is_final) = fits::search_emptied(shape, ground, node, &mut left);
        *steps -= given - left;
        if matches!(ended, Ended::OutOfSteps) && given < part {
            return None;
        }
        let suffices = matches!(ended, Ended::Found(_));
        self.nodes[node] = Some(Known { layout, stamp: (!is_final).then_some(stamp), suffices });
        Some(suffices)
    }
}
