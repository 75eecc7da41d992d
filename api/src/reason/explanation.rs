//! Reasons counted, and the one way to say them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use serde::ser::{Serialize, SerializeSeq, SerializeStruct, Serializer};

use super::Reason;
use crate::names::NodeName;
use crate::quantity::Quantity;

/// Longest message of an event, bytes (`events.k8s.io/v1` validates `note`).
pub const MAX_EVENT_BYTES: usize = 1024;

/// Room kept in a message for the words that say how much was left out.
const REMAINDER_BYTES: usize = 48;

/// How many devices fell to which test.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Explanation {
    tallies: BTreeMap<Reason, Tally>,
    /// Boxed, since most of what holds an explanation is small.
    nearest: Option<Box<NearestMiss>>,
}

/// The node on which the least would have to change for a fit. Ordered from near to far.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NearestMiss {
    /// How many more devices would have to do.
    pub lacking: u64,
    /// The test that the next of them falls to: of several that which comes last.
    pub reason: std::cmp::Reverse<Reason>,
    /// How much it is short of, where it is short of something.
    pub missing: Option<Quantity>,
    /// The node.
    pub node: NodeName,
    /// How many devices the request wants.
    pub wanted: u64,
}

/// The devices that fell to one test.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tally {
    devices: u64,
    nodes: BTreeSet<NodeName>,
    least_missing: Option<Quantity>,
}

impl Tally {
    /// How many devices.
    pub fn devices(&self) -> u64 {
        self.devices
    }

    /// The nodes they are on.
    pub fn nodes(&self) -> &BTreeSet<NodeName> {
        &self.nodes
    }

    /// The least amount that any of them was short of: what would have to become free for a first
    /// fit.
    pub fn least_missing(&self) -> Option<Quantity> {
        self.least_missing
    }
}

impl Explanation {
    /// Nothing counted.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts devices of a node that fell to a test.
    pub fn count(&mut self, reason: Reason, node: &NodeName, devices: u64) {
        let tally = self.tallies.entry(reason).or_default();
        tally.devices += devices;
        if !tally.nodes.contains(node) {
            tally.nodes.insert(node.clone());
        }
    }

    /// Counts one device that was short of an amount.
    pub fn count_short(&mut self, reason: Reason, node: &NodeName, missing: Quantity) {
        self.count(reason.clone(), node, 1);
        if let Some(tally) = self.tallies.get_mut(&reason) {
            tally.least_missing =
                Some(tally.least_missing.map_or(missing, |least| least.min(missing)));
        }
    }

    /// Tells of a node that would do if less changed there than on any node told of before.
    pub fn near_miss(&mut self, miss: NearestMiss) {
        if self.nearest.as_ref().is_none_or(|nearest| miss < **nearest) {
            self.nearest = Some(Box::new(miss));
        }
    }

    /// The node on which the least would have to change.
    pub fn nearest_miss(&self) -> Option<&NearestMiss> {
        self.nearest.as_deref()
    }

    /// The same in words, as `nearest to a fit: node-a has 1 of 2 devices; the next: too little
    /// memory left (short by 9Gi)`. None where the reasons say as much.
    pub fn nearest_clause(&self) -> Option<String> {
        let NearestMiss { lacking, reason, missing, node, wanted } = self.nearest.as_deref()?;
        let is_only_node = self.tallies.values().all(|tally| tally.nodes.iter().eq([node]));
        let is_said = *wanted == 1 || matches!(reason.0, Reason::Scattered { .. });
        let is_only_device = *wanted == 1 && self.tallies.get(&reason.0)?.devices == 1;
        if is_only_node && is_said || is_only_device {
            return None;
        }
        let short = missing.map(|missing| format!(" (short by {missing})")).unwrap_or_default();
        let there = match wanted.saturating_sub(*lacking) {
            0 if *wanted == 1 => format!("{node}:"),
            has => format!("{node} has {has} of {}; the next:", plural(*wanted, "device")),
        };
        Some(format!("nearest to a fit: {there} {}{short}", reason.0))
    }

    /// Adds what another explanation counted.
    pub fn merge(&mut self, other: &Self) {
        other.nearest.iter().for_each(|miss| self.near_miss((**miss).clone()));
        for (reason, theirs) in &other.tallies {
            let tally = self.tallies.entry(reason.clone()).or_default();
            tally.devices += theirs.devices;
            tally.nodes.extend(theirs.nodes.iter().cloned());
            tally.least_missing =
                [tally.least_missing, theirs.least_missing].into_iter().flatten().min();
        }
    }

    /// Whether nothing was counted: there is no device anywhere.
    pub fn is_empty(&self) -> bool {
        self.tallies.is_empty()
    }

    /// The counts by reason, the reasons nearest to a fit first.
    pub fn tallies(&self) -> impl Iterator<Item = (&Reason, &Tally)> {
        self.tallies.iter().rev()
    }

    /// One clause for each reason, as `2 devices on 1 node: too little memory left (short by 9Gi at
    /// least)`, nearest to a fit first.
    pub fn clauses(&self) -> impl Iterator<Item = String> {
        self.tallies().map(|(reason, tally)| clause(reason, tally))
    }

    /// One line for people: per reason, how many devices on how many nodes. Reasons nearest to a
    /// fit come first; what does not go into `limit` bytes is counted at the end, so that the
    /// line is never cut within a word. Where there is room for it the nearest miss comes last.
    pub fn render(&self, limit: usize) -> String {
        if self.is_empty() {
            return "no devices are published".to_owned();
        }
        let mut line = String::new();
        for (said, clause) in self.clauses().enumerate() {
            let left = self.tallies.len() - said;
            let room = if left == 1 { limit } else { limit.saturating_sub(REMAINDER_BYTES) };
            let separator = if said == 0 { "" } else { "; " };
            if line.len() + separator.len() + clause.len() > room {
                return with_remainder(line, &clause, left, limit);
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

/// Ends a line that has no room for `left` more reasons; a first reason that is too long by itself
/// is cut.
fn with_remainder(mut line: String, next: &str, left: usize, limit: usize) -> String {
    if line.is_empty() {
        let room = limit.saturating_sub(REMAINDER_BYTES);
        line = format!("{}…", &next[..next.floor_char_boundary(room)]);
        return if left > 1 { format!("{line}; and {}", reasons(left - 1)) } else { line };
    }
    format!("{line}; and {}", reasons(left))
}

fn reasons(count: usize) -> String {
    if count == 1 { "1 more reason".to_owned() } else { format!("{count} more reasons") }
}

fn clause(reason: &Reason, tally: &Tally) -> String {
    let devices = plural(tally.devices, "device");
    let nodes = plural(tally.nodes.len() as u64, "node");
    let mut clause = format!("{devices} on {nodes}: {reason}");
    if let Some(missing) = tally.least_missing {
        // Writing to a String cannot fail.
        let _ = write!(clause, " (short by {missing} at least)");
    }
    clause
}

fn plural(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

impl Serialize for Explanation {
    /// A list, nearest to a fit first: `[{"code", "message", "devices", "nodes", "leastMissing"?,
    /// "nearest"?}]`; one of them has the nearest miss, `{"node", "lacking", "wanted",
    /// "missing"?}`.
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
        let missing = self.tally.least_missing;
        let optional = usize::from(missing.is_some()) + usize::from(self.nearest.is_some());
        let mut row = serializer.serialize_struct("Tally", 4 + optional)?;
        row.serialize_field("code", self.reason.code())?;
        row.serialize_field("message", &self.reason.to_string())?;
        row.serialize_field("devices", &self.tally.devices)?;
        row.serialize_field("nodes", &self.tally.nodes)?;
        if let Some(missing) = &missing {
            row.serialize_field("leastMissing", missing)?;
        }
        if let Some(nearest) = self.nearest {
            row.serialize_field("nearest", nearest)?;
        }
        row.end()
    }
}
