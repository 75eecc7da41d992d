//! Feasible nodes per shape: searched once per node, and again after a change of the node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::cluster::{Cluster, FastMap, NameId, NodeIndex};
use crate::forecast::Forecast;
use crate::outcome::PlanWork;
use crate::policy::{ForecastView, Rank, Ranking};
use crate::search::{Search, SearchFailure, SearchOutcome};
use crate::shape::{Chosen, Selections, Shape};
use crate::wide_hash::WideHash;

/// Search results of all nodes for one shape.
#[derive(Debug, Default)]
pub(crate) struct Feasibility {
    /// Cluster time up to which all changes are included; `None` if some nodes were not searched.
    searched_until: Option<u64>,
    /// [`Cluster::reordered`] at the last refresh.
    reordered: u64,
    /// [`Forecast::generation`] of the ranks; 0 if the ranks do not depend on the forecast.
    forecast: u64,
    /// Stamp of each node at its last search; 0 if it was not searched.
    stamps: Vec<u64>,
    /// Feasible nodes with their ranks and orders.
    feasible: FastMap<NodeIndex, (NodeRank, u64)>,
    /// Failed searches, with the claims at which they failed.
    failed: BTreeMap<NodeIndex, (usize, SearchFailure)>,
    /// Feasible nodes, best first.
    ranked: BTreeSet<Ranked>,
    /// Feasible nodes with ranks of an older forecast.
    outdated: BTreeSet<NodeIndex>,
    /// Number of searches per node that exhausted the steps. A retry is cheaper, since selector
    /// results are cached.
    undecided: BTreeMap<NodeIndex, u32>,
    /// Steps spent by refreshes since the last one that searched all nodes.
    spent: u64,
    /// Steps that the next search needs to get further than the last one.
    needed: u64,
}

/// Size of a feasible node in both lists, in bytes.
const FEASIBLE_BYTES: usize = 120;

/// Maximum number of such searches before the node is skipped until it changes.
const MAX_TRIES: u32 = 8;

/// Rank of a node for a shape; less is better. The first element is the depth in the lists of
/// alternatives, which kube-scheduler minimizes too.
pub(crate) type NodeRank = (usize, Rank);

/// A feasible node: its rank, its order by name, its index.
type Ranked = (NodeRank, u64, NodeIndex);

/// Result of a search on one node.
#[derive(Clone)]
enum NodeFeasibility {
    /// The shape fits, with this rank.
    Feasible(NodeRank),
    /// The shape does not fit.
    Infeasible,
    /// The search failed, at this claim.
    Failed(usize, SearchFailure),
    /// The search exhausted the steps.
    Undecided,
}

/// Error: a search of a node has exhausted a reduced budget, and has to be repeated.
struct BudgetTooSmall;

/// Minimum number of nodes among which results are shared.
const MIN_SHARING: usize = 8;

/// The searches of one refresh. Nodes in the same state share their results.
struct NodeSearches {
    /// Steps of a pod.
    full_budget: u64,
    is_shared: bool,
    /// Attributes that decide about a result; `None` until the first search has resolved them.
    attributes: Option<Arc<[NameId]>>,
    results: FastMap<SharedKey, NodeFeasibility>,
}

/// State of a node, and its free CPU if that is part of its rank.
type SharedKey = (WideHash, u64);

impl NodeSearches {
    /// Creates the searches of this number of nodes.
    fn new(nodes: usize, full_budget: u64) -> Self {
        let is_shared = nodes >= MIN_SHARING;
        Self { full_budget, is_shared, attributes: None, results: FastMap::default() }
    }

    /// Returns the key of a node; `None` if its result is not shared.
    fn key(
        &mut self,
        node: NodeIndex,
        shape: &Shape,
        context: &mut FitContext<'_>,
    ) -> Option<SharedKey> {
        if !self.is_shared {
            return None;
        }
        let FitContext { cluster, selections, .. } = context;
        if self.attributes.is_none() {
            self.attributes = shape.decisive_attributes(selections, &mut cluster.interner);
        }
        let cpu = if shape.uses_forecast() { cluster.nodes[node].cpu_milli } else { 0 };
        if shape.uses_topology() {
            cluster.gather_positions(node);
        }
        let (_, state, ..) = cluster.search_inputs_with_state(node, self.attributes.as_deref())?;
        Some((state?.node(), cpu))
    }

    fn get(&self, key: Option<SharedKey>) -> Option<NodeFeasibility> {
        self.results.get(&key?).cloned()
    }

    /// Keeps a result that does not depend on names or steps.
    fn add(&mut self, key: Option<SharedKey>, result: &NodeFeasibility) {
        let is_shared =
            matches!(result, NodeFeasibility::Feasible(_) | NodeFeasibility::Infeasible);
        if let Some(key) = key.filter(|_| is_shared) {
            self.results.insert(key, result.clone());
        }
    }
}

/// Cluster and caches that a search uses.
pub(crate) struct FitContext<'p> {
    pub(crate) cluster: &'p mut Cluster,
    pub(crate) selections: &'p mut Selections,
    pub(crate) forecast: &'p Forecast,
    pub(crate) work: &'p mut PlanWork,
}

impl Feasibility {
    /// Searches the nodes that have changed, as far as the steps suffice. `full_budget`
    /// is that of a pod.
    pub(crate) fn refresh(
        &mut self,
        shape: &mut Shape,
        context: &mut FitContext<'_>,
        steps: &mut u64,
        full_budget: u64,
    ) {
        let mut found = Vec::new();
        let given = *steps;
        self.follow(shape, context);
        self.refresh_changed(shape, context, steps, full_budget, &mut found);
        if !self.is_partial() {
            self.spent = 0;
        } else if !context.selections.was_withheld() {
            self.spent += given - *steps;
        }
        if self.ranked.is_empty() {
            // Building the set at once takes a tenth of the time of single insertions.
            self.ranked = found.into_iter().collect();
        } else {
            self.ranked.extend(found);
        }
    }

    /// Searches one node if it has changed, as far as the steps suffice. Returns false if a search
    /// with the full budget of a pod may get further.
    pub(crate) fn refresh_node(
        &mut self,
        node: NodeIndex,
        shape: &mut Shape,
        context: &mut FitContext<'_>,
        steps: &mut u64,
        full_budget: u64,
    ) -> bool {
        self.follow(shape, context);
        self.stamps.resize(context.cluster.nodes.len(), 0);
        let tries = self.undecided.get(&node).copied().unwrap_or(0);
        let is_known = self.stamps[node] == context.cluster.nodes[node].stamp
            && !self.outdated.contains(&node);
        if is_known && (tries == 0 || tries >= MAX_TRIES) {
            return true;
        }
        let mut searches = NodeSearches::new(1, full_budget);
        let fit = self.search_node(node, shape, context, steps, &mut searches);
        let is_decided = fit.is_ok();
        self.ranked.extend(fit.ok().flatten());
        is_decided
    }

    /// Follows a new order of nodes and a new forecast.
    ///
    /// If a shape fits depends on neither, so only feasible nodes are searched again for a new
    /// forecast: their ranks depend on the devices that the search chooses.
    fn follow(&mut self, shape: &Shape, context: &FitContext<'_>) {
        let reordered = context.cluster.reordered();
        if self.reordered != reordered {
            self.reordered = reordered;
            for (node, (_, order)) in &mut self.feasible {
                *order = context.cluster.order(*node);
            }
            let ranked = self.feasible.iter().map(|(node, (rank, order))| (*rank, *order, *node));
            self.ranked = ranked.collect();
        }
        let generation = if shape.uses_forecast() { context.forecast.generation() } else { 0 };
        if self.forecast != generation {
            self.forecast = generation;
            self.outdated = self.feasible.keys().copied().collect();
        }
    }

    /// Searches the nodes that have changed, and collects the feasible ones in `found`.
    fn refresh_changed(
        &mut self,
        shape: &mut Shape,
        context: &mut FitContext<'_>,
        steps: &mut u64,
        full_budget: u64,
        found: &mut Vec<Ranked>,
    ) {
        let cluster = &*context.cluster;
        self.stamps.resize(cluster.nodes.len(), 0);
        let changed = self.searched_until.and_then(|time| cluster.changed_since(time));
        let changed: Vec<NodeIndex> =
            changed.map_or_else(|| (0..cluster.nodes.len()).collect(), <[_]>::to_vec);
        let now = cluster.now();
        // A refresh that continues has tried them already.
        let may_try = |tries: &u32| self.spent == 0 && *tries < MAX_TRIES;
        let again =
            self.undecided.iter().filter(|(_, tries)| may_try(tries)).map(|(node, _)| *node);
        let is_new = |node: &NodeIndex| self.stamps[*node] != cluster.nodes[*node].stamp;
        let outdated = self.outdated.iter().copied();
        // Each once: a node can change several times in a plan.
        let mut to_search: Vec<NodeIndex> =
            again.chain(outdated).chain(changed.into_iter().filter(is_new)).collect();
        to_search.sort_unstable();
        to_search.dedup();
        let mut searches = NodeSearches::new(to_search.len(), full_budget);
        for node in to_search {
            if *steps == 0 {
                self.searched_until = None;
                return;
            }
            let Ok(fit) = self.search_node(node, shape, context, steps, &mut searches) else {
                self.searched_until = None;
                return;
            };
            found.extend(fit);
        }
        self.searched_until = Some(now);
    }

    /// Searches one node and stores the result. Returns its rank if the shape fits.
    fn search_node(
        &mut self,
        node: NodeIndex,
        shape: &mut Shape,
        context: &mut FitContext<'_>,
        steps: &mut u64,
        searches: &mut NodeSearches,
    ) -> Result<Option<Ranked>, BudgetTooSmall> {
        let full_budget = searches.full_budget;
        let tries = self.take_tries(node, context.cluster);
        let key = searches.key(node, shape, context);
        context.work.nodes_searched += 1;
        if let Some(known) = searches.get(key) {
            *steps -= 1;
            return Ok(self.store(node, known, context.cluster));
        }
        let (given, kept) = (*steps, context.selections.kept());
        let result = evaluate(shape, context, node, steps);
        if matches!(result, NodeFeasibility::Undecided) {
            if given < full_budget / 2 {
                // Results of selectors are kept, so that the next search gets further with as many
                // steps. A search of combinations starts anew.
                let selections = &context.selections;
                let has_progress = selections.kept() > kept || selections.was_withheld();
                self.needed = if has_progress { 0 } else { full_budget.min(2 * given) };
                return Err(BudgetTooSmall);
            }
            self.undecided.insert(node, tries + 1);
        }
        self.needed = 0;
        searches.add(key, &result);
        Ok(self.store(node, result, context.cluster))
    }

    /// Drops the result of a node. Returns the number of exhausted searches since the node changed.
    fn take_tries(&mut self, node: NodeIndex, cluster: &Cluster) -> u32 {
        if let Some((rank, order)) = self.feasible.remove(&node) {
            self.ranked.remove(&(rank, order, node));
        }
        self.failed.remove(&node);
        self.outdated.remove(&node);
        let tries = self.undecided.remove(&node).unwrap_or(0);
        let stamp = std::mem::take(&mut self.stamps[node]);
        if stamp == cluster.nodes[node].stamp { tries } else { 0 }
    }

    fn store(
        &mut self,
        node: NodeIndex,
        result: NodeFeasibility,
        cluster: &Cluster,
    ) -> Option<Ranked> {
        self.stamps[node] = cluster.nodes[node].stamp;
        match result {
            NodeFeasibility::Feasible(rank) => {
                let order = cluster.order(node);
                self.feasible.insert(node, (rank, order));
                return Some((rank, order, node));
            }
            NodeFeasibility::Failed(claim, failure) => {
                self.failed.insert(node, (claim, failure));
            }
            NodeFeasibility::Infeasible | NodeFeasibility::Undecided => {}
        }
        None
    }

    /// Returns the number of steps that the next refresh needs to get further than the last one.
    pub(crate) fn needed_steps(&self) -> u64 {
        self.needed
    }

    /// Returns true if the steps of a pod were spent before all nodes were searched. From then on
    /// they are counted anew.
    pub(crate) fn take_exhausted(&mut self, full_budget: u64) -> bool {
        let is_exhausted = self.spent >= full_budget;
        if is_exhausted {
            self.spent = 0;
        }
        is_exhausted
    }

    /// Returns the feasible nodes, best first.
    pub(crate) fn ranked(&self) -> impl Iterator<Item = (NodeRank, NodeIndex)> {
        self.ranked.iter().map(|(rank, _, node)| (*rank, *node))
    }

    /// Returns the number of feasible nodes.
    pub(crate) fn len(&self) -> usize {
        self.ranked.len()
    }

    /// Returns true if the shape fits on the node.
    pub(crate) fn is_feasible(&self, node: NodeIndex) -> bool {
        self.feasible.contains_key(&node)
    }

    /// Returns true if the search of the node exhausted the steps.
    pub(crate) fn is_undecided(&self, node: NodeIndex) -> bool {
        self.undecided.contains_key(&node)
    }

    /// Returns the failure of the search of the node, and the claim at which it failed.
    pub(crate) fn failure(&self, node: NodeIndex) -> Option<(usize, &SearchFailure)> {
        self.failed.get(&node).map(|(claim, failure)| (*claim, failure))
    }

    /// Returns the approximate size of the results, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.stamps.len() * size_of::<u64>() + self.feasible.len() * FEASIBLE_BYTES
    }

    /// Returns true if the steps were spent before all changed nodes were searched.
    pub(crate) fn is_partial(&self) -> bool {
        self.searched_until.is_none()
    }

    /// Returns true if the result of some node is missing.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.is_partial() || !self.undecided.is_empty()
    }
}

/// Searches a node for devices.
pub(crate) fn search(
    shape: &mut Shape,
    context: &mut FitContext<'_>,
    node: NodeIndex,
    seed: u64,
    steps: &mut u64,
) -> SearchOutcome {
    if shape.uses_topology() {
        context.cluster.gather_positions(node);
    }
    let forecast_view = forecast_view(shape, context, node);
    let Some((reachable, interner, features)) = context.cluster.search_inputs(node) else {
        return SearchOutcome::Infeasible;
    };
    shape.resolve_profiles(reachable.candidates.iter().map(|c| c.profile), interner, features);
    Search {
        shape,
        reachable,
        features,
        interner,
        selections: context.selections,
        steps,
        seed,
        forecast_view,
    }
    .run()
}

/// Searches a node as if all its releasable devices were free. The second element is true if the
/// result does not depend on current usage.
pub(crate) fn search_drained(
    shape: &mut Shape,
    context: &mut FitContext<'_>,
    node: NodeIndex,
    steps: &mut u64,
) -> (SearchOutcome, bool) {
    let forecast_view = forecast_view(shape, context, node);
    let Some(((reachable, is_final), interner, features)) =
        context.cluster.drained_search_inputs(node)
    else {
        return (SearchOutcome::Infeasible, true);
    };
    *steps = steps.saturating_sub(reachable.candidates.len() as u64);
    shape.resolve_profiles(reachable.candidates.iter().map(|c| c.profile), interner, features);
    let selections = &mut *context.selections;
    let search = Search {
        shape,
        reachable: &reachable,
        features,
        interner,
        selections,
        steps,
        seed: 0,
        forecast_view,
    };
    (search.run(), is_final)
}

fn forecast_view<'p>(shape: &Shape, context: &FitContext<'p>, node: NodeIndex) -> ForecastView<'p> {
    ForecastView {
        potential: context.forecast.potential(),
        cpu_free: context.cluster.nodes[node].cpu_milli,
        cpu_requested: shape.cpu_milli,
    }
}

fn evaluate(
    shape: &mut Shape,
    context: &mut FitContext<'_>,
    node: NodeIndex,
    steps: &mut u64,
) -> NodeFeasibility {
    match search(shape, context, node, 0, steps) {
        SearchOutcome::Found(chosen) => {
            let forecast_view = forecast_view(shape, context, node);
            let Some((reachable, interner, _)) = context.cluster.search_inputs(node) else {
                return NodeFeasibility::Infeasible;
            };
            let ranking = Ranking::new(reachable, interner, &reachable.left, 0, forecast_view);
            NodeFeasibility::Feasible((
                alternative_depth(&chosen),
                shape.node_policy().rank_node(&ranking, shape, &chosen),
            ))
        }
        SearchOutcome::Infeasible => NodeFeasibility::Infeasible,
        SearchOutcome::Failed(claim, failure) => NodeFeasibility::Failed(claim, failure),
        SearchOutcome::OutOfSteps => NodeFeasibility::Undecided,
    }
}

/// Returns the sum of the positions of the chosen alternatives in their lists.
fn alternative_depth(chosen: &[Vec<Chosen>]) -> usize {
    let of_claim = |devices: &Vec<Chosen>| {
        let mut last = None;
        let is_first = |d: &&Chosen| last.replace(d.request) != Some(d.request);
        devices.iter().filter(is_first).map(|d| d.alternative).sum::<usize>()
    };
    chosen.iter().map(of_claim).sum()
}
