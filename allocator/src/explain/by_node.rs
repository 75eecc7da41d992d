//! Reasons per node for one class of pods. Nodes with equal reasons share them.

use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::sync::Arc;

use tessera_api::reason::Reason;

use super::{AlternativeReasons, NodeReasons, RefusalExplanation};
use crate::cluster::{FastMap, NodeIndex, NodeNames};
use crate::outcome::RefusalCause;
use crate::shape::Shape;

/// Reasons why the claims of a class do not fit, per node.
#[derive(Debug, Default)]
pub(crate) struct ReasonsByNode {
    table: Arc<ReasonTable>,
    /// Index in `distinct` plus one, by the hash of the reasons. All classes grow at once, and a
    /// map that grows would hash the reasons of all nodes again.
    ids: FastMap<u64, u32>,
    /// Sums of all nodes per alternative, as of the last call of
    /// [`sum_up`](Self::sum_up).
    sums: Vec<AlternativeSums>,
    /// Number of nodes with each of the distinct reasons in the sums.
    summed: Vec<u32>,
    /// Indexes of distinct reasons whose number of nodes may differ from `summed`.
    changed: Vec<usize>,
}

/// Sums of one alternative over all nodes.
#[derive(Debug, Default)]
struct AlternativeSums {
    /// Number of devices per reason.
    devices: BTreeMap<Reason, u64>,
    /// Number of nodes that have enough devices for the request by itself.
    served: usize,
}

impl AlternativeSums {
    /// Adds the reasons of this number of nodes.
    fn add(&mut self, reasons: &AlternativeReasons, nodes: u32) {
        self.served += usize::from(reasons.served) * nodes as usize;
        for (reason, tally) in &reasons.tallies {
            let added = tally.devices * u64::from(nodes);
            match self.devices.get_mut(reason) {
                Some(devices) => *devices += added,
                None => drop(self.devices.insert(reason.clone(), added)),
            }
        }
    }

    /// Subtracts the reasons of this number of nodes.
    fn subtract(&mut self, reasons: &AlternativeReasons, nodes: u32) {
        self.served -= usize::from(reasons.served) * nodes as usize;
        for (reason, tally) in &reasons.tallies {
            let Some(devices) = self.devices.get_mut(reason) else { continue };
            *devices -= tally.devices * u64::from(nodes);
            if *devices == 0 {
                self.devices.remove(reason);
            }
        }
    }
}

/// Distinct reasons, and those of each node.
#[derive(Debug, Clone, Default)]
pub(super) struct ReasonTable {
    distinct: Vec<Arc<NodeReasons>>,
    /// Number of nodes with each of the distinct reasons.
    counts: Vec<u32>,
    /// Index in `distinct` plus one, per node; 0 for a node without reasons.
    nodes: Vec<u32>,
}

impl ReasonTable {
    /// Returns the distinct reasons of the nodes, and the number of nodes with each.
    pub(super) fn used(&self) -> impl Iterator<Item = (&NodeReasons, u32)> {
        let all = self.distinct.iter().zip(&self.counts);
        all.filter(|(_, nodes)| **nodes > 0).map(|(reasons, nodes)| (&**reasons, *nodes))
    }

    /// Returns the reasons of each node that has some.
    pub(super) fn nodes(&self) -> impl Iterator<Item = (NodeIndex, &NodeReasons)> {
        self.nodes.iter().enumerate().filter_map(|(node, id)| Some((node, self.get(*id)?)))
    }

    /// Returns the nodes whose reasons are such.
    pub(super) fn nodes_with(
        &self,
        is_it: impl Fn(&NodeReasons) -> bool,
    ) -> impl Iterator<Item = NodeIndex> {
        let is_it: Vec<bool> = self.distinct.iter().map(|reasons| is_it(reasons)).collect();
        let has = move |id: u32| (id as usize).checked_sub(1).is_some_and(|at| is_it[at]);
        self.nodes.iter().enumerate().filter(move |(_, id)| has(**id)).map(|(node, _)| node)
    }

    /// Returns the number of nodes with counted devices for this alternative.
    pub(super) fn with_devices(&self, alternative: usize) -> usize {
        let has_devices = |reasons: &NodeReasons| !reasons.0[alternative].tallies.is_empty();
        let nodes = self.used().filter(|(reasons, _)| has_devices(reasons));
        nodes.map(|(_, nodes)| nodes as usize).sum()
    }

    fn get(&self, id: u32) -> Option<&NodeReasons> {
        Some(&**self.distinct.get((id as usize).checked_sub(1)?)?)
    }
}

impl ReasonsByNode {
    /// Sets the reasons of a node. Returns true if they have changed.
    pub(crate) fn set(&mut self, node: NodeIndex, reasons: Option<NodeReasons>) -> bool {
        let old = self.table.nodes.get(node).copied().unwrap_or(0);
        if self.table.get(old) == reasons.as_ref() {
            return false;
        }
        let id = reasons.map_or(0, |reasons| self.id(reasons));
        self.replace(node, old, id);
        if self.table.distinct.len() > 2 * self.table.nodes.len() + 64 {
            self.compact();
        }
        true
    }

    /// Gives a node the reasons of another one. Returns true if they have changed.
    pub(crate) fn set_like(&mut self, node: NodeIndex, other: NodeIndex) -> bool {
        let id = |node| self.table.nodes.get(node).copied().unwrap_or(0);
        let (old, new) = (id(node), id(other));
        if old != new {
            self.replace(node, old, new);
        }
        old != new
    }

    fn replace(&mut self, node: NodeIndex, old: u32, new: u32) {
        let table = Arc::make_mut(&mut self.table);
        if table.nodes.len() <= node {
            table.nodes.resize(node + 1, 0);
        }
        table.nodes[node] = new;
        for (id, by) in [(old, u32::MAX), (new, 1)] {
            let Some(at) = (id as usize).checked_sub(1) else { continue };
            let is_summed = self.summed.get(at).copied().unwrap_or(0) == table.counts[at];
            table.counts[at] = table.counts[at].wrapping_add(by);
            self.changed.extend(is_summed.then_some(at));
        }
    }

    /// Updates the sums by the numbers of nodes that have changed.
    pub(crate) fn sum_up(&mut self) {
        self.summed.resize(self.table.distinct.len(), 0);
        for at in std::mem::take(&mut self.changed) {
            let (reasons, now) = (&self.table.distinct[at], self.table.counts[at]);
            let before = std::mem::replace(&mut self.summed[at], now);
            let alternatives = reasons.0.len().max(self.sums.len());
            self.sums.resize_with(alternatives, AlternativeSums::default);
            for (sums, own) in self.sums.iter_mut().zip(&reasons.0) {
                match now.checked_sub(before) {
                    Some(added) => sums.add(own, added),
                    None => sums.subtract(own, before - now),
                }
            }
        }
    }

    fn id(&mut self, reasons: NodeReasons) -> u32 {
        let hash = foldhash::quality::FixedState::default().hash_one(&reasons);
        let known = self.ids.get(&hash).copied();
        if let Some(known) = known.filter(|id| self.table.get(*id) == Some(&reasons)) {
            return known;
        }
        let table = Arc::make_mut(&mut self.table);
        table.distinct.push(Arc::new(reasons));
        table.counts.push(0);
        let id = u32::try_from(table.distinct.len()).unwrap_or(u32::MAX);
        self.ids.insert(hash, id);
        id
    }

    /// Removes the reasons that no node has any more.
    fn compact(&mut self) {
        self.sum_up();
        let table = Arc::make_mut(&mut self.table);
        let (mut kept, mut new_ids) = (ReasonTable::default(), vec![0; table.distinct.len() + 1]);
        for (at, nodes) in table.counts.iter().enumerate().filter(|(_, nodes)| **nodes > 0) {
            kept.distinct.push(Arc::clone(&table.distinct[at]));
            kept.counts.push(*nodes);
            new_ids[at + 1] = u32::try_from(kept.distinct.len()).unwrap_or(u32::MAX);
        }
        kept.nodes = table.nodes.iter().map(|id| new_ids[*id as usize]).collect();
        self.ids.retain(|_, id| {
            *id = new_ids[*id as usize];
            *id > 0
        });
        *table = kept;
        self.summed.clone_from(&table.counts);
    }

    /// Returns the number of distinct reasons that are kept.
    pub(crate) fn len(&self) -> usize {
        self.table.distinct.len()
    }

    /// Returns the cause to report for each claim, by the sums of the last call of
    /// [`sum_up`](Self::sum_up). `version` is the number of this state of the
    /// reasons.
    pub(crate) fn causes(
        &self,
        version: Option<u64>,
        shape: &Shape,
        names: &Arc<NodeNames>,
    ) -> Vec<Arc<RefusalCause>> {
        debug_assert!(self.changed.is_empty(), "summed up after the last change");
        let is_served = |alternative| {
            self.sums.get(alternative).is_some_and(|sums: &AlternativeSums| sums.served > 0)
        };
        let cause = |claim: &crate::shape::ClaimShape| {
            let mut requests = (0..claim.len()).map(|request| claim.alternatives(request));
            // The explanation of the first request that no node can serve by itself, or of the
            // first request if there is none. Of a request with alternatives it is the explanation
            // of the last one, the fallback.
            let decisive = requests
                .find(|alternatives| !alternatives.clone().any(is_served))
                .or_else(|| (claim.len() > 0).then(|| claim.alternatives(0)));
            let alternative = decisive.and_then(|alternatives| alternatives.last());
            let totals = alternative.and_then(|alternative| self.sums.get(alternative));
            let totals = totals.map(|sums| sums.devices.clone()).unwrap_or_default();
            let explanation =
                RefusalExplanation::new(&self.table, version, names, alternative, totals);
            Arc::new(RefusalCause::NoFit(explanation))
        };
        shape.claims.iter().map(cause).collect()
    }
}
