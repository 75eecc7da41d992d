//! Explanation of a refusal, computed when it is first read.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use tessera_api::names::NodeName;
use tessera_api::reason::{Explanation, NearestMiss, Reason};

use super::AlternativeReasons;
use super::by_node::ReasonTable;

/// Explanation of a claim that fits on no node. Its parts are shared by all pods with equal claims
/// and constraints; the text is built on first use.
#[derive(Clone)]
pub struct RefusalExplanation {
    source: Option<Source>,
    totals: OnceLock<BTreeMap<Reason, u64>>,
    explanation: OnceLock<Explanation>,
}

/// The alternative that decides about the claim, in a table of reasons per node.
#[derive(Clone)]
struct Source {
    table: Arc<ReasonTable>,
    names: Arc<Vec<NodeName>>,
    alternative: usize,
}

impl RefusalExplanation {
    /// Creates the explanation of one alternative; `None` if the claim has none.
    pub(super) fn new(
        table: &Arc<ReasonTable>,
        names: &Arc<Vec<NodeName>>,
        alternative: Option<usize>,
    ) -> Self {
        let source = alternative.map(|alternative| Source {
            table: Arc::clone(table),
            names: Arc::clone(names),
            alternative,
        });
        Self { source, totals: OnceLock::new(), explanation: OnceLock::new() }
    }

    /// Returns the number of devices per reason, without building the explanation.
    pub fn totals(&self) -> &BTreeMap<Reason, u64> {
        self.totals.get_or_init(|| match &self.source {
            Some(source) => source.totals(),
            None => {
                let tallies = self.explanation.get().into_iter().flat_map(Explanation::tallies);
                tallies.map(|(reason, tally)| (reason.clone(), tally.devices())).collect()
            }
        })
    }
}

impl Source {
    fn totals(&self) -> BTreeMap<Reason, u64> {
        let mut totals = BTreeMap::new();
        for (reasons, nodes) in self.table.used() {
            for (reason, tally) in &reasons.0[self.alternative].tallies {
                *totals.entry(reason.clone()).or_default() += tally.devices * u64::from(nodes);
            }
        }
        totals
    }

    fn explanation(&self) -> Explanation {
        let mut explanation = Explanation::new();
        for (node, reasons) in self.table.nodes() {
            let name = &self.names[node];
            let AlternativeReasons { tallies, nearest, .. } = &reasons.0[self.alternative];
            for (reason, tally) in tallies {
                explanation.add(reason.clone(), name, *tally);
            }
            if let Some(near) = nearest {
                explanation.near_miss(NearestMiss {
                    lacking: near.lacking,
                    reason: std::cmp::Reverse(near.reason.clone()),
                    missing: near.missing,
                    node: name.clone(),
                    wanted: near.wanted,
                });
            }
        }
        explanation
    }
}

impl Deref for RefusalExplanation {
    type Target = Explanation;

    fn deref(&self) -> &Explanation {
        self.explanation
            .get_or_init(|| self.source.as_ref().map(Source::explanation).unwrap_or_default())
    }
}

impl fmt::Debug for RefusalExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl From<Explanation> for RefusalExplanation {
    fn from(explanation: Explanation) -> Self {
        Self { source: None, totals: OnceLock::new(), explanation: explanation.into() }
    }
}

impl PartialEq for RefusalExplanation {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}
