//! Devices counted by reason and node.

use std::collections::BTreeMap;

use serde::ser::{Serialize, SerializeSeq, SerializeStruct, Serializer};

use super::Reason;
use super::counts::{ReasonCount, ReasonCounts};
use crate::names::NodeName;
use crate::quantity::Quantity;

/// The devices of all nodes, counted by the reason that excludes them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Explanation {
    tallies: BTreeMap<Reason, Tally>,
    /// Boxed, because most holders of an explanation are small.
    nearest: Option<Box<NearestMiss>>,
}

/// The node that is closest to satisfying the request. Ordered from near to far.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NearestMiss {
    /// Number of devices that the node lacks.
    pub lacking: u64,
    /// The reason that excludes the next device: of several the last in the order of the search.
    pub reason: std::cmp::Reverse<Reason>,
    /// Amount that the next device is short of, for reasons with an amount.
    pub missing: Option<Quantity>,
    /// The node.
    pub node: NodeName,
    /// Number of devices that the request asks for.
    pub wanted: u64,
}

/// The devices that one reason excludes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tally {
    total: NodeTally,
    nodes: BTreeMap<NodeName, NodeTally>,
}

/// The devices of one node that one reason excludes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct NodeTally {
    /// Number of devices.
    pub devices: u64,
    /// Least amount that any of them is short of: a first device fits once it is released.
    pub least_missing: Option<Quantity>,
}

impl NodeTally {
    /// Adds the devices of another tally.
    pub fn add(&mut self, other: Self) {
        self.devices += other.devices;
        let both = [self.least_missing, other.least_missing];
        self.least_missing = both.into_iter().flatten().min();
    }
}

impl Tally {
    /// Returns the devices of all nodes.
    pub fn total(&self) -> NodeTally {
        self.total
    }

    /// Returns the number of devices.
    pub fn devices(&self) -> u64 {
        self.total.devices
    }

    /// Returns the devices by node.
    pub fn nodes(&self) -> &BTreeMap<NodeName, NodeTally> {
        &self.nodes
    }

    /// Returns the least amount that any of the devices is short of.
    pub fn least_missing(&self) -> Option<Quantity> {
        self.total.least_missing
    }

    /// Returns the node with most of the devices, by name among equals.
    fn largest(&self) -> Option<(&NodeName, u64)> {
        let nodes = self.nodes.iter().map(|(node, tally)| (node, tally.devices));
        nodes.min_by_key(|(_, devices)| std::cmp::Reverse(*devices))
    }
}

impl Explanation {
    /// Returns an explanation of no devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts devices of a node.
    pub fn count(&mut self, reason: Reason, node: &NodeName, devices: u64) {
        self.add(reason, node, NodeTally { devices, least_missing: None });
    }

    /// Counts one device that is short of an amount.
    pub fn count_short(&mut self, reason: Reason, node: &NodeName, missing: Quantity) {
        self.add(reason, node, NodeTally { devices: 1, least_missing: Some(missing) });
    }

    /// Counts devices of a node that are short of an amount, if the reason has one.
    pub fn add(&mut self, reason: Reason, node: &NodeName, added: NodeTally) {
        let tally = self.tallies.entry(reason).or_default();
        tally.total.add(added);
        match tally.nodes.get_mut(node) {
            Some(known) => known.add(added),
            None => {
                tally.nodes.insert(node.clone(), added);
            }
        }
    }

    /// Records a node that lacks less than all nodes recorded before.
    pub fn near_miss(&mut self, miss: NearestMiss) {
        if self.nearest.as_ref().is_none_or(|nearest| miss < **nearest) {
            self.nearest = Some(Box::new(miss));
        }
    }

    /// Returns the node that is closest to satisfying the request.
    pub fn nearest_miss(&self) -> Option<&NearestMiss> {
        self.nearest.as_deref()
    }

    /// Adds the counts of another explanation.
    pub fn merge(&mut self, other: &Self) {
        other.nearest.iter().for_each(|miss| self.near_miss((**miss).clone()));
        for (reason, added) in &other.tallies {
            for (node, tally) in &added.nodes {
                self.add(reason.clone(), node, *tally);
            }
        }
    }

    /// Returns true if no device is counted.
    pub fn is_empty(&self) -> bool {
        self.tallies.is_empty()
    }

    /// Returns the counts by reason, the reasons nearest to a fit first.
    pub fn tallies(&self) -> impl Iterator<Item = (&Reason, &Tally)> {
        self.tallies.iter().rev()
    }

    /// Returns the number of all counted devices.
    pub fn devices(&self) -> u64 {
        self.tallies.values().map(Tally::devices).sum()
    }

    /// Returns the number of devices that the request could use one by one.
    pub fn available(&self) -> u64 {
        let available = self.tallies.iter().filter(|(reason, _)| reason.is_available());
        available.map(|(_, tally)| tally.devices()).sum()
    }

    /// Returns the number of nodes with counted devices.
    pub fn nodes(&self) -> usize {
        self.by_node().len()
    }

    /// Returns the nodes with their devices by reason, the reasons nearest to a fit first.
    pub fn by_node(&self) -> BTreeMap<&NodeName, Vec<(&Reason, NodeTally)>> {
        let mut nodes: BTreeMap<&NodeName, Vec<(&Reason, NodeTally)>> = BTreeMap::new();
        for (reason, tally) in self.tallies() {
            for (node, count) in &tally.nodes {
                nodes.entry(node).or_default().push((reason, *count));
            }
        }
        nodes
    }

    /// Returns the counts without the nodes, for one-line texts.
    pub fn counts(&self) -> ReasonCounts {
        let tallies = self.tallies.iter();
        let count = |(reason, tally): (&Reason, &Tally)| {
            let names_node = matches!(reason, Reason::TooFewOnNode { .. });
            let largest = tally.largest().filter(|_| names_node);
            let largest = largest.map(|(node, devices)| (node.clone(), devices));
            (reason.clone(), ReasonCount { total: tally.total, largest })
        };
        let nearest = self.nearest.as_deref().cloned();
        ReasonCounts::new(tallies.map(count).collect(), nearest, self.nodes())
    }

    /// Returns the nearest miss as text: see [`ReasonCounts::nearest_clause`].
    pub fn nearest_clause(&self) -> Option<String> {
        self.counts().nearest_clause()
    }

    /// Returns one line: see [`ReasonCounts::render`].
    pub fn render(&self, limit: usize) -> String {
        self.counts().render(limit)
    }

    /// Returns one line about a claim: see [`ReasonCounts::render_for`].
    pub fn render_for(&self, subject: &str, limit: usize) -> String {
        self.counts().render_for(subject, limit)
    }

    /// Returns a short line with the nearest miss: see [`ReasonCounts::summary`].
    pub fn summary(&self, subject: &str) -> String {
        self.counts().summary(subject)
    }

    /// Returns the totals in kube-scheduler's form: see [`ReasonCounts::totals`].
    pub fn totals(&self) -> String {
        self.counts().totals()
    }
}

impl Serialize for Explanation {
    /// Writes a list, nearest to a fit first: `[{"code", "message", "devices", "nodes",
    /// "leastMissing"?, "nearest"?}]`. One element has the nearest miss, `{"node", "lacking",
    /// "wanted", "missing"?}`.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.tallies.len()))?;
        for (reason, tally) in self.tallies() {
            let nearest = self.nearest.as_deref().filter(|miss| miss.reason.0 == *reason);
            list.serialize_element(&Row { reason, tally, nearest })?;
        }
        list.end()
    }
}

struct Row<'e> {
    reason: &'e Reason,
    tally: &'e Tally,
    nearest: Option<&'e NearestMiss>,
}

impl Serialize for NearestMiss {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut miss =
            serializer.serialize_struct("NearestMiss", 3 + usize::from(self.missing.is_some()))?;
        miss.serialize_field("node", &self.node)?;
        miss.serialize_field("lacking", &self.lacking)?;
        miss.serialize_field("wanted", &self.wanted)?;
        if let Some(missing) = &self.missing {
            miss.serialize_field("missing", missing)?;
        }
        miss.end()
    }
}

impl Serialize for Row<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let missing = self.tally.least_missing();
        let optional = usize::from(missing.is_some()) + usize::from(self.nearest.is_some());
        let mut row = serializer.serialize_struct("Tally", 4 + optional)?;
        row.serialize_field("code", self.reason.code())?;
        row.serialize_field("message", &self.reason.to_string())?;
        row.serialize_field("devices", &self.tally.devices())?;
        row.serialize_field("nodes", &self.tally.nodes.keys().collect::<Vec<_>>())?;
        if let Some(missing) = &missing {
            row.serialize_field("leastMissing", missing)?;
        }
        if let Some(nearest) = self.nearest {
            row.serialize_field("nearest", nearest)?;
        }
        row.end()
    }
}
