//! Devices counted by reason, and their one rendering as text.

use std::collections::BTreeMap;

use super::{NearestMiss, NodeTally, Reason};
use crate::names::NodeName;

/// Longest message of an event, bytes (`events.k8s.io/v1` validates `note`).
pub const MAX_EVENT_BYTES: usize = 1024;

/// Bytes reserved in a message for the count of the reasons that are left out.
const REMAINDER_BYTES: usize = 48;

/// The devices of an [`Explanation`](super::Explanation), counted by reason without their nodes:
/// all that its one-line texts need.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReasonCounts {
    counts: BTreeMap<Reason, ReasonCount>,
    nearest: Option<NearestMiss>,
    nodes: usize,
}

/// The devices that one reason excludes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReasonCount {
    /// Devices of all nodes.
    pub total: NodeTally,
    /// Node with most of the devices, by name among equals, for
    /// [`TooFewOnNode`](Reason::TooFewOnNode).
    pub largest: Option<(NodeName, u64)>,
}

impl ReasonCounts {
    /// Creates the counts of all devices on this number of nodes.
    pub fn new(
        counts: BTreeMap<Reason, ReasonCount>,
        nearest: Option<NearestMiss>,
        nodes: usize,
    ) -> Self {
        Self { counts, nearest, nodes }
    }

    /// Returns the number of all counted devices.
    fn devices(&self) -> u64 {
        self.counts.values().map(|count| count.total.devices).sum()
    }

    /// Returns the number of devices that the request could use one by one.
    fn available(&self) -> u64 {
        let available = self.counts.iter().filter(|(reason, _)| reason.is_available());
        available.map(|(_, count)| count.total.devices).sum()
    }

    /// Returns the totals in kube-scheduler's form: `0/12 GPUs available`.
    pub fn totals(&self) -> String {
        format!("{}/{} GPUs available", self.available(), self.devices())
    }

    /// Returns a short line with the nearest miss: `0/12 GPUs available for claim gpu; closest is
    /// node-a: insufficient memory (9Gi short)`.
    pub fn summary(&self, subject: &str) -> String {
        let totals = format!("{} for {subject}", self.totals());
        if self.counts.is_empty() {
            return totals + ": no GPUs are published";
        }
        let few = self.counts.iter().rev().find(|(r, _)| matches!(r, Reason::TooFewOnNode { .. }));
        let only = self.counts.iter().next_back().filter(|_| self.counts.len() == 1);
        let clause =
            few.or(only).map(|(reason, count)| format!(": {}", count_clause(reason, count)));
        let nearest = self.nearest_text().filter(|_| only.is_none() || self.nodes > 1);
        let nearest = nearest.map(|nearest| format!("; {nearest}"));
        totals + &clause.unwrap_or_default() + &nearest.unwrap_or_default()
    }

    /// Returns the nearest miss as text: `closest is node-a with 1 of 2 GPUs; the next GPU there:
    /// insufficient memory (9Gi short)`. None if the counts by reason contain it already.
    pub fn nearest_clause(&self) -> Option<String> {
        let NearestMiss { reason, node, wanted, .. } = self.nearest.as_ref()?;
        let is_only_node = self.nodes == 1;
        let is_told = *wanted == 1 || matches!(reason.0, Reason::TopologyTooSmall { .. });
        let is_only_device = self.counts.get(&reason.0)?.total.devices == 1;
        if is_only_node && is_told || is_only_device && (*wanted == 1 || self.names_largest(node)) {
            return None;
        }
        self.nearest_text()
    }

    fn nearest_text(&self) -> Option<String> {
        let NearestMiss { lacking, reason, missing, node, wanted } = self.nearest.as_ref()?;
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
        let few = self.counts.iter().find(|(r, _)| matches!(r, Reason::TooFewOnNode { .. }));
        let largest = few.and_then(|(_, count)| count.largest.as_ref());
        largest.is_some_and(|(largest, _)| largest == node)
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
        if self.counts.is_empty() {
            return line + "no GPUs are published";
        }
        let start = line.len();
        for (written, (reason, count)) in self.counts.iter().rev().enumerate() {
            let clause = count_clause(reason, count);
            let left = self.counts.len() - written;
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

impl NodeTally {
    /// Returns the amount in parentheses, to follow a reason: ` (9Gi short)`.
    fn shortage(&self) -> String {
        match self.least_missing {
            None => String::new(),
            Some(missing) if self.devices == 1 => format!(" ({missing} short)"),
            Some(missing) => format!(" (at least {missing} short)"),
        }
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

fn count_clause(reason: &Reason, count: &ReasonCount) -> String {
    if let (Reason::TooFewOnNode { requested }, Some((node, devices))) = (reason, &count.largest) {
        let are = if *devices == 1 { "is" } else { "are" };
        return format!("only {devices} of {requested} requested GPUs {are} available on {node}");
    }
    clause(reason, count.total)
}

/// Returns the number of devices with their reason: `2 insufficient memory (at least 9Gi short)`.
pub fn clause(reason: &Reason, tally: NodeTally) -> String {
    format!("{} {reason}{}", tally.devices, tally.shortage())
}
