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

    /// The least amount that any of them was short of: what would have to become free for a first fit.
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
            tally.least_missing = Some(tally.least_missing.map_or(missing, |least| least.min(missing)));
        }
    }

    /// Adds what another explanation counted.
    pub fn merge(&mut self, other: &Self) {
        for (reason, theirs) in &other.tallies {
            let tally = self.tallies.entry(reason.clone()).or_default();
            tally.devices += theirs.devices;
            tally.nodes.extend(theirs.nodes.iter().cloned());
            tally.least_missing = [tally.least_missing, theirs.least_missing].into_iter().flatten().min();
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

    /// One clause for each reason, as `2 devices on 1 node: too little memory left (short by 9Gi at least)`, nearest to a fit
    /// first.
    pub fn clauses(&self) -> impl Iterator<Item = String> {
        self.tallies().map(|(reason, tally)| clause(reason, tally))
    }

    /// One line for people: per reason, how many devices on how many nodes. Reasons nearest to a fit come first; what does
    /// not go into `limit` bytes is counted at the end, so that the line is never cut within a word.
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
        line
    }
}

/// Ends a line that has no room for `left` more reasons; a first reason that is too long by itself is cut.
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
    /// A list, nearest to a fit first: `[{"code", "message", "devices", "nodes", "leastMissing"?}]`.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.tallies.len()))?;
        for (reason, tally) in self.tallies() {
            list.serialize_element(&Row { reason, tally })?;
        }
        list.end()
    }
}

struct Row<'e> {
    reason: &'e Reason,
    tally: &'e Tally,
}

impl Serialize for Row<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let missing = self.tally.least_missing;
        let mut row = serializer.serialize_struct("Tally", if missing.is_some() { 5 } else { 4 })?;
        row.serialize_field("code", self.reason.code())?;
        row.serialize_field("message", &self.reason.to_string())?;
        row.serialize_field("devices", &self.tally.devices)?;
        row.serialize_field("nodes", &self.tally.nodes)?;
        if let Some(missing) = &missing {
            row.serialize_field("leastMissing", missing)?;
        }
        row.end()
    }
}
