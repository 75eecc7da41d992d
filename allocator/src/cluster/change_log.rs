//! Log of changed nodes.

use super::NodeIndex;

/// Most recently changed nodes, one per tick of its clock.
#[derive(Debug, Default)]
pub(super) struct ChangeLog {
    clock: u64,
    nodes: Vec<NodeIndex>,
}

impl ChangeLog {
    /// Records a change, and returns its time. `nodes` is the number of nodes.
    pub(super) fn push(&mut self, node: NodeIndex, nodes: usize) -> u64 {
        self.clock += 1;
        if self.nodes.len() > 2 * nodes + 1024 {
            self.nodes.clear();
        }
        self.nodes.push(node);
        self.clock
    }

    /// Returns the time of the last change.
    pub(super) fn now(&self) -> u64 {
        self.clock
    }

    /// Returns the nodes changed after `then`; `None` if that is too long ago, so any may have
    /// changed.
    pub(super) fn since(&self, then: u64) -> Option<&[NodeIndex]> {
        let first = self.clock + 1 - self.nodes.len() as u64;
        let from = usize::try_from((then + 1).checked_sub(first)?).ok()?;
        self.nodes.get(from..)
    }
}
