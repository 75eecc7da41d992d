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
            // The newer half stays: without it, the next plan would examine all nodes for each
            // class.
            self.nodes.drain(..self.nodes.len() / 2);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_changes_are_always_known() {
        let (mut log, nodes) = (ChangeLog::default(), 10);
        for change in 0..10_000 {
            let before = log.now();
            log.push(change % nodes, nodes);
            assert_eq!(log.since(before), Some(&[change % nodes][..]), "{change}");
            assert_eq!(log.since(log.now()), Some(&[][..]));
            let earlier = change.min(500);
            let known = log.since(log.now() - earlier as u64).expect("the newer half is kept");
            assert_eq!(known.len(), earlier);
        }
        assert_eq!(log.since(0), None, "the log is bounded");
        assert!(log.nodes.len() <= 2 * nodes + 1025);
    }
}
