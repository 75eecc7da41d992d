//! Explanation of a refusal, computed when it is first read.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use tessera_api::names::NodeName;
use tessera_api::reason::{Explanation, NodeTally, Reason, ReasonCount, ReasonCounts};

use super::AlternativeReasons;
use super::by_node::ReasonTable;
use crate::cluster::NodeNames;

/// Explanation of a claim that fits on no node. Its parts are shared by all pods with equal claims
/// and constraints; the text is built on first use.
#[derive(Clone)]
pub struct RefusalExplanation {
    // Boxed, because searches keep results of thousands of nodes, few with an explanation.
    parts: Box<Parts>,
}

#[derive(Clone)]
struct Parts {
    id: Option<ExplanationId>,
    source: Option<Source>,
    /// Number of devices per reason.
    totals: BTreeMap<Reason, u64>,
    counts: OnceLock<ReasonCounts>,
    explanation: OnceLock<Explanation>,
}

/// Identity of an explanation of a class of pods. Explanations with the same identity are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExplanationId {
    /// Number of the state of the reasons, for one class at one time.
    version: u64,
    alternative: usize,
}

/// The alternative that decides about the claim, in a table of reasons per node.
#[derive(Clone)]
struct Source {
    table: Arc<ReasonTable>,
    names: Arc<NodeNames>,
    alternative: usize,
}

impl RefusalExplanation {
    /// Creates the explanation of one alternative; `None` if the claim has none. `version` is the
    /// number of the state of the table, for one that is kept.
    pub(super) fn new(
        table: &Arc<ReasonTable>,
        version: Option<u64>,
        names: &Arc<NodeNames>,
        alternative: Option<usize>,
        totals: BTreeMap<Reason, u64>,
    ) -> Self {
        let id = version.zip(alternative);
        let id = id.map(|(version, alternative)| ExplanationId { version, alternative });
        let source = alternative.map(|alternative| Source {
            table: Arc::clone(table),
            names: Arc::clone(names),
            alternative,
        });
        let (counts, explanation) = (OnceLock::new(), OnceLock::new());
        Self { parts: Box::new(Parts { id, source, totals, counts, explanation }) }
    }

    /// Returns the identity of the explanation; none if it is of a single pod.
    pub fn id(&self) -> Option<ExplanationId> {
        self.parts.id
    }

    /// Returns the number of reasons to count before the text is rendered: those of the nodes,
    /// each once. 0 if they are counted.
    pub fn uncounted(&self) -> usize {
        let Parts { source, counts, .. } = &*self.parts;
        source
            .as_ref()
            .filter(|_| counts.get().is_none())
            .map_or(0, |from| from.table.used().count())
    }

    /// Returns the number of devices per reason.
    pub fn totals(&self) -> &BTreeMap<Reason, u64> {
        &self.parts.totals
    }

    /// Returns the explanation without what is only known per node: its text is the same.
    pub(crate) fn without_nodes(&self) -> Self {
        let Parts { id, totals, .. } = &*self.parts;
        let counts = OnceLock::from(self.counts().clone());
        let (id, totals, source, explanation) = (*id, totals.clone(), None, OnceLock::new());
        Self { parts: Box::new(Parts { id, source, totals, counts, explanation }) }
    }

    /// Returns what the texts need, without building the explanation.
    pub fn counts(&self) -> &ReasonCounts {
        self.parts.counts.get_or_init(|| match &self.parts.source {
            Some(source) => source.counts(),
            None => self.parts.explanation.get().map(Explanation::counts).unwrap_or_default(),
        })
    }

    /// Returns one line about a claim, without building the explanation: see
    /// [`ReasonCounts::render_for`].
    pub fn render_for(&self, subject: &str, limit: usize) -> String {
        self.counts().render_for(subject, limit)
    }
}

impl Source {
    /// Counts the devices by reason. The nodes are only looked at for the names that a text has:
    /// thousands of nodes have a few distinct reasons.
    fn counts(&self) -> ReasonCounts {
        let mut counts: BTreeMap<Reason, ReasonCount> = BTreeMap::new();
        let (mut most, mut nearest) = (0, None);
        for (reasons, nodes) in self.table.used() {
            let AlternativeReasons { tallies, nearest: near, .. } = &reasons.0[self.alternative];
            for (reason, tally) in tallies {
                let total = NodeTally { devices: tally.devices * u64::from(nodes), ..*tally };
                // Thousands of nodes have the same few reasons: a copy for each takes most of the
                // time.
                match counts.get_mut(reason) {
                    Some(count) => count.total.add(total),
                    None => counts.entry(reason.clone()).or_default().total.add(total),
                }
                if matches!(reason, Reason::TooFewOnNode { .. }) {
                    most = most.max(tally.devices);
                }
            }
            let near = near.as_deref();
            nearest =
                nearest.into_iter().chain(near).min_by(|a, b| a.distance().cmp(&b.distance()));
        }
        for (reason, count) in &mut counts {
            let has_most = |own: &AlternativeReasons| {
                own.tallies.iter().any(|(r, tally)| r == reason && tally.devices == most)
            };
            if matches!(reason, Reason::TooFewOnNode { .. }) {
                count.largest = self.first_node(has_most).map(|node| (node, most));
            }
        }
        let nearest = nearest.and_then(|near| {
            let is_it = |own: &AlternativeReasons| own.nearest.as_deref() == Some(near);
            Some(near.on(self.first_node(is_it)?))
        });
        ReasonCounts::new(counts, nearest, self.table.with_devices(self.alternative))
    }

    /// Returns the first node by name with such reasons.
    fn first_node(&self, is_it: impl Fn(&AlternativeReasons) -> bool) -> Option<NodeName> {
        let found = self.table.nodes_with(|reasons| is_it(&reasons.0[self.alternative]));
        self.names.first(found).cloned()
    }

    fn explanation(&self) -> Explanation {
        let mut explanation = Explanation::new();
        for (node, reasons) in self.table.nodes() {
            let name = self.names.get(node);
            let AlternativeReasons { tallies, nearest, .. } = &reasons.0[self.alternative];
            for (reason, tally) in tallies {
                explanation.add(reason.clone(), name, *tally);
            }
            if let Some(near) = nearest {
                explanation.near_miss(near.on(name.clone()));
            }
        }
        explanation
    }
}

impl Deref for RefusalExplanation {
    type Target = Explanation;

    fn deref(&self) -> &Explanation {
        let Parts { explanation, source, .. } = &*self.parts;
        explanation.get_or_init(|| source.as_ref().map(Source::explanation).unwrap_or_default())
    }
}

impl fmt::Debug for RefusalExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl From<Explanation> for RefusalExplanation {
    fn from(explanation: Explanation) -> Self {
        let tallies = explanation.tallies();
        let totals = tallies.map(|(reason, tally)| (reason.clone(), tally.devices())).collect();
        let (id, source, counts) = (None, None, OnceLock::new());
        Self {
            parts: Box::new(Parts { id, source, totals, counts, explanation: explanation.into() }),
        }
    }
}

impl PartialEq for RefusalExplanation {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}
