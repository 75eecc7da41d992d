//! Where a shape fits: worked out once for each node, and again for a node that has changed.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::{Cluster, NodeIndex};
use crate::forecast::Forecast;
use crate::policy::{Outlook, Rank, Ranking};
use crate::search::{Chosen, Ended, Failure, Search};
use crate::shape::{Selections, Shape};

/// What is known of all nodes for one shape.
#[derive(Debug, Default)]
pub(crate) struct Fits {
    /// The cluster's time up to which everything is known; none where some nodes are not.
    seen: Option<u64>,
    /// As [`Cluster::reordered`].
    reordered: u64,
    /// Of which [`Forecast`] the ranks are; 0 where none depends on it.
    forecast: u64,
    nodes: Vec<NodeFit>,
    /// The nodes on which it fits, best first.
    ranked: BTreeSet<Ranked>,
    /// Nodes whose search took all steps, and how often. What it found out about selectors is
    /// known the next time.
    undecided: BTreeMap<NodeIndex, u32>,
}

/// A search that has taken all steps so often is not tried again before its node changes.
const MAX_TRIES: u32 = 8;

/// How good a node is for a shape; less is better. First how far down the lists of preference the
/// claims had to go: kube-scheduler, too, prefers the node with the least.
pub(crate) type NodeRank = (usize, Rank);

/// A node on which it fits: its rank, its place by name, and its index.
type Ranked = (NodeRank, u64, NodeIndex);

#[derive(Debug, Default)]
struct NodeFit {
    stamp: u64,
    answer: Answer,
}

/// Whether a shape fits on a node.
#[derive(Debug, Default)]
pub(crate) enum Answer {
    /// It has not been asked.
    #[default]
    Unknown,
    /// It does.
    Fits(NodeRank),
    /// It does not.
    Not,
    /// The search had to be stopped, at this claim.
    Failed(usize, Box<Failure>),
    /// The search took more steps than there were.
    Undecided,
}

/// A search that had only what others had left over, and not enough: it is made again.
struct CutShort;

/// What is searched, and what is known of it.
pub(crate) struct Ground<'p> {
    pub(crate) cluster: &'p mut Cluster,
    pub(crate) selections: &'p mut Selections,
    pub(crate) forecast: &'p Forecast,
}

impl Fits {
    /// Finds out about the nodes that have changed, as far as the steps go; `whole` is what a pod
    /// gets that is the first.
    pub(crate) fn refresh(
        &mut self,
        shape: &mut Shape,
        ground: &mut Ground<'_>,
        steps: &mut u64,
        whole: u64,
    ) {
        let mut found = Vec::new();
        self.renew(shape, ground);
        self.ask(shape, ground, steps, whole, &mut found);
        if self.ranked.is_empty() {
            // Put into order all at once: a tenth of the time of one by one.
            self.ranked = found.into_iter().collect();
        } else {
            self.ranked.extend(found);
        }
    }

    /// Finds out about one node, if it has changed, as far as the steps go.
    pub(crate) fn refresh_node(
        &mut self,
        node: NodeIndex,
        shape: &mut Shape,
        ground: &mut Ground<'_>,
        steps: &mut u64,
    ) {
        self.renew(shape, ground);
        self.nodes.resize_with(ground.cluster.nodes.len(), NodeFit::default);
        let tries = self.undecided.get(&node).copied().unwrap_or(0);
        let is_known = self.nodes[node].stamp == ground.cluster.nodes[node].stamp;
        if is_known && (tries == 0 || tries >= MAX_TRIES) {
            return;
        }
        let whole = *steps;
        let fit = self.ask_node(node, shape, ground, steps, whole);
        self.ranked.extend(fit.ok().flatten());
    }

    /// Forgets everything where nodes have other places or ranks now.
    fn renew(&mut self, shape: &Shape, ground: &Ground<'_>) {
        let generation = if shape.looks_ahead() { ground.forecast.generation() } else { 0 };
        let reordered = ground.cluster.reordered();
        if self.reordered != reordered || self.forecast != generation {
            *self = Self { reordered, forecast: generation, ..Self::default() };
        }
    }

    /// Asks the nodes that have changed; `found` are those on which it fits.
    fn ask(
        &mut self,
        shape: &mut Shape,
        ground: &mut Ground<'_>,
        steps: &mut u64,
        whole: u64,
        found: &mut Vec<Ranked>,
    ) {
        let cluster = &*ground.cluster;
        self.nodes.resize_with(cluster.nodes.len(), NodeFit::default);
        let changed = self.seen.and_then(|seen| cluster.changed_since(seen));
        let changed: Vec<NodeIndex> =
            changed.map_or_else(|| (0..cluster.nodes.len()).collect(), <[_]>::to_vec);
        let now = cluster.now();
        let again =
            self.undecided.iter().filter(|(_, tries)| **tries < MAX_TRIES).map(|(node, _)| *node);
        let is_new = |node: &NodeIndex| self.nodes[*node].stamp != cluster.nodes[*node].stamp;
        // Each once: a node changes several times in a plan.
        let asked: BTreeSet<NodeIndex> = again.chain(changed.into_iter().filter(is_new)).collect();
        for node in asked {
            if *steps == 0 {
                self.seen = None;
                return;
            }
            let Ok(fit) = self.ask_node(node, shape, ground, steps, whole) else {
                self.seen = None;
                return;
            };
            found.extend(fit);
        }
        self.seen = Some(now);
    }

    /// Searches one node and remembers the answer. Returns its rank, if the shape fits.
    fn ask_node(
        &mut self,
        node: NodeIndex,
        shape: &mut Shape,
        ground: &mut Ground<'_>,
        steps: &mut u64,
        whole: u64,
    ) -> Result<Option<Ranked>, CutShort> {
        let tries = self.forget(node, ground.cluster);
        let given = *steps;
        let answer = evaluate(shape, ground, node, steps);
        if matches!(answer, Answer::Undecided) {
            if given < whole / 2 {
                return Err(CutShort);
            }
            self.undecided.insert(node, tries + 1);
        }
        Ok(self.learn(node, answer, ground.cluster))
    }

    /// Forgets what is known of the node. Gives how often its search took all steps since it
    /// changed.
    fn forget(&mut self, node: NodeIndex, cluster: &Cluster) -> u32 {
        let known = std::mem::take(&mut self.nodes[node]);
        if let Answer::Fits(rank) = known.answer {
            self.ranked.remove(&(rank, cluster.nodes[node].order, node));
        }
        let tries = self.undecided.remove(&node).unwrap_or(0);
        if known.stamp == cluster.nodes[node].stamp { tries } else { 0 }
    }

    fn learn(&mut self, node: NodeIndex, answer: Answer, cluster: &Cluster) -> Option<Ranked> {
        let fit = match &answer {
            Answer::Fits(rank) => Some((*rank, cluster.nodes[node].order, node)),
            _ => None,
        };
        self.nodes[node] = NodeFit { stamp: cluster.nodes[node].stamp, answer };
        fit
    }

    /// The nodes on which it fits, best first.
    pub(crate) fn ranked(&self) -> impl Iterator<Item = (NodeRank, NodeIndex)> {
        self.ranked.iter().map(|(rank, _, node)| (*rank, *node))
    }

    /// On how many nodes it is known to fit.
    pub(crate) fn len(&self) -> usize {
        self.ranked.len()
    }

    /// What is known of a node.
    pub(crate) fn answer(&self, node: NodeIndex) -> &Answer {
        self.nodes.get(node).map_or(&Answer::Unknown, |fit| &fit.answer)
    }

    /// Returns `true` if the steps ended before all nodes that have changed were searched.
    pub(crate) fn is_cut_short(&self) -> bool {
        self.seen.is_none()
    }

    /// Whether something is not known of some nodes.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.is_cut_short() || !self.undecided.is_empty()
    }
}

/// Searches a node.
pub(crate) fn search(
    shape: &mut Shape,
    ground: &mut Ground<'_>,
    node: NodeIndex,
    seed: u64,
    steps: &mut u64,
) -> Ended {
    if shape.asks_for_places() {
        ground.cluster.gather_places(node);
    }
    let outlook = outlook(shape, ground, node);
    let Some((reach, interner, features)) = ground.cluster.parts(node) else { return Ended::None };
    shape.meet_offers(reach.candidates.iter().map(|c| c.offer), interner, features);
    Search { shape, reach, features, interner, selections: ground.selections, steps, seed, outlook }
        .run()
}

/// Searches a node as if all were given back that can be. Whether that is the same whatever is
/// taken comes with it.
pub(crate) fn search_emptied(
    shape: &mut Shape,
    ground: &mut Ground<'_>,
    node: NodeIndex,
    steps: &mut u64,
) -> (Ended, bool) {
    let outlook = outlook(shape, ground, node);
    let Some(((reach, is_final), interner, features)) = ground.cluster.parts_emptied(node) else {
        return (Ended::None, true);
    };
    *steps = steps.saturating_sub(reach.candidates.len() as u64);
    shape.meet_offers(reach.candidates.iter().map(|c| c.offer), interner, features);
    let selections = &mut *ground.selections;
    let search =
        Search { shape, reach: &reach, features, interner, selections, steps, seed: 0, outlook };
    (search.run(), is_final)
}

fn outlook<'p>(shape: &Shape, ground: &Ground<'p>, node: NodeIndex) -> Outlook<'p> {
    Outlook {
        potential: ground.forecast.potential(),
        cpu_left: ground.cluster.nodes[node].cpu_milli,
        cpu_asked: shape.cpu_milli,
    }
}

fn evaluate(
    shape: &mut Shape,
    ground: &mut Ground<'_>,
    node: NodeIndex,
    steps: &mut u64,
) -> Answer {
    match search(shape, ground, node, 0, steps) {
        Ended::Found(chosen) => {
            let outlook = outlook(shape, ground, node);
            let Some((reach, interner, _)) = ground.cluster.parts(node) else { return Answer::Not };
            let ranking = Ranking::new(reach, interner, &reach.left, 0, outlook);
            Answer::Fits((
                descent(&chosen),
                shape.node_policy().rank_node(&ranking, shape, &chosen),
            ))
        }
        Ended::None => Answer::Not,
        Ended::Failed(claim, failure) => Answer::Failed(claim, Box::new(failure)),
        Ended::OutOfSteps => Answer::Undecided,
    }
}

/// How far down the lists of preference a solution had to go.
fn descent(chosen: &[Vec<Chosen>]) -> usize {
    let of_claim = |devices: &Vec<Chosen>| {
        let mut last = None;
        let fresh = |d: &&Chosen| last.replace(d.request) != Some(d.request);
        devices.iter().filter(fresh).map(|d| d.alternative).sum::<usize>()
    };
    chosen.iter().map(of_claim).sum()
}
