//! Devices counted by reason, and their one rendering as text.

use std::collections::BTreeMap;

use serde::ser::{Serialize, SerializeSeq, SerializeStruct, Serializer};

use super::Reason;
use crate::names::NodeName;
use crate::quantity::Quantity;

/// Longest message of an event, bytes (`events.k8s.io/v1` validates `note`).
pub const MAX_EVENT_BYTES: usize = 1024;

/// Bytes reserved in a message for the count of the reasons that are left out.
const REMAINDER_BYTES: usize = 48;

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

    /// Returns the amount in parentheses, to follow a reason: ` (9Gi short)`.
    fn shortage(&self) -> String {
        match self.least_missing {
            None => String::new(),
            Some(missing) if self.devices == 1 => format!(" ({missing} short)"),
            Some(missing) => format!(" (at least {missing} short)"),
        }
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

    /// Returns the nearest miss as text: `closest is node-a with 1 of 2 GPUs; the next GPU there:
    /// insufficient memory (9Gi short)`. None if the counts by reason contain it already.
    pub fn nearest_clause(&self) -> Option<String> {
        let NearestMiss { reason, node, wanted, .. } = self.nearest.as_deref()?;
        let is_only_node = self.tallies.values().all(|tally| tally.nodes.keys().eq([node]));
        let is_told = *wanted == 1 || matches!(reason.0, Reason::TopologyTooSmall { .. });
        let is_only_device = self.tallies.get(&reason.0)?.devices() == 1;
        if is_only_node && is_told || is_only_device && (*wanted == 1 || self.names_largest(node)) {
            return None;
        }
        self.nearest_text()
    }

    fn nearest_text(&self) -> Option<String> {
        let NearestMiss { lacking, reason, missing, node, wanted } = self.nearest.as_deref()?;
        let short = missing.map(|missing| format!(" ({missing} short)")).unwrap_or_default();
        let there = match wanted.saturating_sub(*lacking) {
            _ if *wanted == 1 => format!("closest is {node}"),
            _ if self.names_largest(node) => format!("the next GPU on {node}"),
            has => format!("closest is {node} with {has} of {wanted} GPUs; the next GPU there"),
        };
        let reason = reason.0.to_string();
        // The texts follow a number of devices, which there is none of here.
        let reason = reason.strip_prefix("with ").unwrap_or(&reason);
        Some(format!("{there}: {reason}{short}"))
    }

    /// Returns true if a clause reports how many GPUs are available on that node.
    fn names_largest(&self, node: &NodeName) -> bool {
        let few = self.tallies.iter().find(|(r, _)| matches!(r, Reason::TooFewOnNode { .. }));
        few.and_then(|(_, tally)| tally.largest()).is_some_and(|(largest, _)| largest == node)
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

    /// Returns the totals in kube-scheduler's form: `0/12 GPUs available`.
    pub fn totals(&self) -> String {
        format!("{}/{} GPUs available", self.available(), self.devices())
    }

    /// Returns a short line with the nearest miss: `0/12 GPUs available for claim gpu; closest is
    /// node-a: insufficient memory (9Gi short)`.
    pub fn summary(&self, subject: &str) -> String {
        let totals = format!("{} for {subject}", self.totals());
        if self.is_empty() {
            return totals + ": no GPUs are published";
        }
        let few = self.tallies().find(|(r, _)| matches!(r, Reason::TooFewOnNode { .. }));
        let only = self.tallies().next().filter(|_| self.tallies.len() == 1);
        let clause =
            few.or(only).map(|(reason, tally)| format!(": {}", tally_clause(reason, tally)));
        let nearest = self.nearest_text().filter(|_| only.is_none() || self.nodes() > 1);
        let nearest = nearest.map(|nearest| format!("; {nearest}"));
        totals + &clause.unwrap_or_default() + &nearest.unwrap_or_default()
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

    /// Returns one line: `0/12 GPUs available: 1 insufficient cores (25 short), 7 not selected by
    /// DeviceClass h100`. See [`render_for`](Self::render_for).
    pub fn render(&self, limit: usize) -> String {
        self.render_after(self.totals(), limit)
    }

    /// Returns one line about a claim: `0/12 GPUs available for ResourceClaim gpu: 1 insufficient
    /// cores (25 short)`.
    ///
    /// Reasons nearest to a fit come first, then the nearest miss if it fits into `limit` bytes.
    /// Reasons that do not fit are counted at the end, so the line is never cut within a word.
    pub fn render_for(&self, subject: &str, limit: usize) -> String {
        self.render_after(format!("{} for {subject}", self.totals()), limit)
    }

    fn render_after(&self, answer: String, limit: usize) -> String {
        let mut line = answer + ": ";
        if self.is_empty() {
            return line + "no GPUs are published";
        }
        let start = line.len();
        for (written, (reason, tally)) in self.tallies().enumerate() {
            let clause = tally_clause(reason, tally);
            let left = self.tallies.len() - written;
            let room = if left == 1 { limit } else { limit.saturating_sub(REMAINDER_BYTES) };
            let separator = if written == 0 { "" } else { ", " };
            if line.len() + separator.len() + clause.len() > room {
                return with_remainder(line, start, &clause, left, limit);
            }
            line.push_str(separator);
            line.push_str(&clause);
        }
        if let Some(nearest) =
            self.nearest_clause().filter(|nearest| line.len() + 2 + nearest.len() <= limit)
        {
            line.push_str("; ");
            line.push_str(&nearest);
        }
        line
    }
}

/// Ends a line without room for `left` more reasons; a first reason that is too long is cut.
fn with_remainder(mut line: String, start: usize, next: &str, left: usize, limit: usize) -> String {
    if line.len() == start {
        let room = limit.saturating_sub(REMAINDER_BYTES + start);
        line = format!("{line}{}…", &next[..next.floor_char_boundary(room)]);
        return if left > 1 { format!("{line}, and {}", reasons(left - 1)) } else { line };
    }
    format!("{line}, and {}", reasons(left))
}

fn reasons(count: usize) -> String {
    if count == 1 { "1 more reason".to_owned() } else { format!("{count} more reasons") }
}

fn tally_clause(reason: &Reason, tally: &Tally) -> String {
    if let (Reason::TooFewOnNode { requested }, Some((node, devices))) = (reason, tally.largest()) {
        let are = if devices == 1 { "is" } else { "are" };
        return format!("only {devices} of {requested} requested GPUs {are} available on {node}");
    }
    clause(reason, tally.total)
}

/// Returns the number of devices with their reason: `2 insufficient memory (at least 9Gi short)`.
pub fn clause(reason: &Reason, tally: NodeTally) -> String {
    format!("{} {reason}{}", tally.devices, tally.shortage())
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
