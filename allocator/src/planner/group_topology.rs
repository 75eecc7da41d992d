//! The topology of a group: all of its pods on nodes with one value of a label, a domain.
//!
//! A group that fits at all is tried in one domain after the other. Domains with as many usable
//! nodes as the group needs come first, the smallest of them before larger ones, so that a large
//! domain stays free for a large group.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use tessera_api::names::NodeName;

use super::group::{GroupFailure, GroupStart, Shortfall};
use super::pass::PlanningPass;
use crate::cluster::NodeIndex;
use crate::model::{GroupTopology, PendingPod};
use crate::outcome::{Decision, GroupShortfall};

/// The most domains that one plan tries for a group and a set of labels.
const MAX_DOMAINS: usize = 64;

/// The most pods that one plan places in domains that turn out to be too small, for a group and a
/// set of labels: with 5,000 usable nodes each takes 10 us.
const MAX_PLACED: usize = 1024;

/// The nodes by the values of some labels.
pub(super) struct Domains {
    /// The number of the domain of each node; none without one of the labels.
    of_node: Vec<Option<usize>>,
    /// The values of the labels in each domain.
    values: Vec<Vec<String>>,
}

/// The domain to which the pods of a group are restricted.
pub(super) struct ChosenDomain {
    domains: Rc<Domains>,
    number: usize,
}

impl ChosenDomain {
    /// Returns true if the node is in the domain.
    pub(super) fn contains(&self, node: NodeIndex) -> bool {
        self.domains.of_node.get(node).is_some_and(|number| *number == Some(self.number))
    }
}

/// A group that can be placed in some order of its pods.
pub(super) struct PlaceableGroup<'g, 'p> {
    pub(super) group: &'p PendingPod,
    pub(super) topology: &'p GroupTopology,
    /// An order in which all pods fit.
    pub(super) order: &'g [&'p PendingPod],
    pub(super) start: &'g GroupStart,
}

/// The domain with the most pods of a group that does not fit in any.
#[derive(Default)]
struct BestDomain {
    domain: Option<ChosenDomain>,
    placed: usize,
}

impl<'p> PlanningPass<'p> {
    /// Places a group anew where its topology asks for, whose pods were placed by these decisions.
    ///
    /// # Errors
    /// The pods do not fit together where the topology requires them.
    pub(super) fn bring_together(
        &mut self,
        placeable: &PlaceableGroup<'_, 'p>,
        decisions: Vec<Decision>,
        steps: &mut u64,
    ) -> Result<Vec<Decision>, GroupFailure> {
        let PlaceableGroup { group, topology, order, start } = *placeable;
        self.roll_back_group(start, &decisions);
        let least_nodes = order.len().div_ceil(most_on_one_node(&decisions));
        let mut best = BestDomain::default();
        for labels in topology.levels() {
            let domains = Rc::new(self.domains_of(&labels));
            let numbers = self.domains_to_try(&domains, placeable, least_nodes, steps);
            best = BestDomain::default();
            let placed = self.place_in_domains(placeable, &domains, numbers, &mut best, steps);
            if let Some(decisions) = placed? {
                return Ok(decisions);
            }
        }
        let Some(label) = topology.required.clone() else {
            // They fit as before.
            let placed = self.place_in_orders(&mut order.to_vec(), start, steps);
            return placed.map_err(|shortfall| {
                self.roll_back_group(start, &shortfall.placed);
                GroupFailure::Undecided
            });
        };
        let first = order[best.placed.min(order.len() - 1)].name.clone();
        let shortfall =
            GroupShortfall { pods: order.len(), placed: best.placed, first, topology: Some(label) };
        if best.domain.is_some() && self.keeps_what_fits(group) {
            self.domain = best.domain;
            drop(self.place_in_orders(&mut order.to_vec(), start, steps));
            self.domain = None;
        }
        Err(GroupFailure::does_not_fit(group, shortfall, Vec::new()))
    }

    /// Places the group in the first of these domains where it fits; none if it fits in none.
    ///
    /// # Errors
    /// The steps were spent.
    fn place_in_domains(
        &mut self,
        placeable: &PlaceableGroup<'_, 'p>,
        domains: &Rc<Domains>,
        numbers: Vec<usize>,
        best: &mut BestDomain,
        steps: &mut u64,
    ) -> Result<Option<Vec<Decision>>, GroupFailure> {
        let PlaceableGroup { order, start, .. } = *placeable;
        let mut spent = 0;
        for number in numbers.into_iter().take(MAX_DOMAINS) {
            let domain = || ChosenDomain { domains: Rc::clone(domains), number };
            self.domain = Some(domain());
            let placed = self.place_in_orders(&mut order.to_vec(), start, steps);
            self.domain = None;
            let Shortfall { placed, most, refused, .. } = match placed {
                Ok(decisions) => return Ok(Some(decisions)),
                Err(shortfall) => shortfall,
            };
            self.roll_back_group(start, &placed);
            if refused.is_undecided() {
                return Err(GroupFailure::Undecided);
            }
            if best.domain.is_none() || most > best.placed {
                *best = BestDomain { domain: Some(domain()), placed: most };
            }
            spent += most;
            if spent > MAX_PLACED {
                break;
            }
        }
        Ok(None)
    }

    /// Returns the nodes by the values of these labels.
    fn domains_of(&self, labels: &[&str]) -> Domains {
        let mut numbers: BTreeMap<Vec<&str>, usize> = BTreeMap::new();
        let mut values = Vec::new();
        let nodes = self.planner.cluster.nodes.iter().map(|entry| {
            let node = entry.node.as_deref()?;
            let value = |label: &&str| node.labels.get(*label).map(String::as_str);
            let of_node: Vec<&str> = labels.iter().map(value).collect::<Option<_>>()?;
            let next = numbers.len();
            Some(*numbers.entry(of_node).or_insert_with_key(|of_node| {
                values.push(of_node.iter().map(ToString::to_string).collect());
                next
            }))
        });
        let of_node = nodes.collect();
        Domains { of_node, values }
    }

    /// Returns the domains in the order in which they are tried: those with a usable node for the
    /// first pod, and only those of pods of the group that have devices already.
    fn domains_to_try(
        &mut self,
        domains: &Domains,
        placeable: &PlaceableGroup<'_, 'p>,
        least_nodes: usize,
        steps: &mut u64,
    ) -> Vec<usize> {
        let PlaceableGroup { topology, order, .. } = *placeable;
        let mut usable: BTreeMap<usize, usize> = BTreeMap::new();
        for node in self.feasible_nodes(order[0], steps) {
            if let Some(number) = domains.of_node[node] {
                *usable.entry(number).or_default() += 1;
            }
        }
        if !topology.placed.is_empty() {
            let known =
                topology.placed.iter().filter_map(|node| self.planner.cluster.node_index(node));
            let present: BTreeSet<usize> = known.filter_map(|node| domains.of_node[node]).collect();
            usable.retain(|number, _| present.contains(number));
        }
        let mut numbers: Vec<(usize, usize)> = usable.into_iter().collect();
        numbers.sort_by_key(|(number, nodes)| {
            let is_too_small = *nodes < least_nodes;
            let largest_first = if is_too_small { Reverse(*nodes) } else { Reverse(0) };
            (is_too_small, largest_first, *nodes, &domains.values[*number])
        });
        numbers.into_iter().map(|(number, _)| number).collect()
    }

    /// Returns the nodes whose devices suffice for the pod.
    fn feasible_nodes(&mut self, pod: &PendingPod, steps: &mut u64) -> Vec<NodeIndex> {
        let to_place = self.undecided_part(pod);
        let Ok((_, shape)) = self.shape_of(&to_place) else { return Vec::new() };
        let full_budget = self.settings.steps_per_pod;
        let (shapes, mut context) = self.planner.search_context();
        let entry = shapes.get_mut(shape);
        entry.feasibility.refresh(&mut entry.shape, &mut context, steps, full_budget);
        let feasibility = &self.planner.shapes.get(shape).feasibility;
        let nodes = 0..self.planner.cluster.nodes.len();
        nodes.filter(|node| feasibility.is_feasible(*node)).collect()
    }
}

/// Returns the largest number of decisions on one node, at least one.
fn most_on_one_node(decisions: &[Decision]) -> usize {
    let mut of_node: BTreeMap<&NodeName, usize> = BTreeMap::new();
    decisions.iter().for_each(|decision| *of_node.entry(&decision.node).or_default() += 1);
    of_node.into_values().max().unwrap_or(1)
}
