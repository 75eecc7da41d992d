//! What the search has taken so far.

use std::collections::BTreeMap;

use tessera_api::quantity::Quantity;

use super::{At, Chosen, Search, constraint_sets};
use crate::capacity;
use crate::constraint::ConstraintSet;
use crate::model::{Attribute, ConstraintKind, Device, DeviceUse};
use crate::pools::Candidate;

pub(super) struct State<'a, 's> {
    candidates: &'a [Candidate<'s>],
    /// What allocated claims take, per candidate.
    used: Vec<Option<&'a DeviceUse>>,
    /// Exclusive devices taken by this search.
    taken: Vec<bool>,
    /// What this search takes of shared devices.
    planned: Vec<Option<BTreeMap<String, Quantity>>>,
    constraints: Vec<ConstraintSet<'s>>,
    chosen: Vec<Vec<Chosen<'s>>>,
    /// Per candidate the number of its equivalence class.
    classes: Vec<usize>,
}

impl<'a, 's> State<'a, 's> {
    pub(super) fn new(search: &Search<'a, 's>) -> Self {
        let count = search.candidates.len();
        Self {
            candidates: search.candidates,
            used: search.candidates.iter().map(|c| search.usage.of(&c.id)).collect(),
            taken: vec![false; count],
            planned: vec![None; count],
            constraints: constraint_sets(search.tasks),
            chosen: vec![Vec::new(); search.tasks.len()],
            classes: classes(search),
        }
    }

    pub(super) fn into_chosen(self) -> Vec<Vec<Chosen<'s>>> {
        self.chosen
    }

    pub(super) fn planned(&self, i: usize) -> Option<&BTreeMap<String, Quantity>> {
        self.planned[i].as_ref()
    }

    pub(super) fn results(&self, c: usize) -> usize {
        self.chosen[c].len()
    }

    /// Whether the whole device is taken, by a claim or by this search.
    pub(super) fn in_use(&self, i: usize) -> bool {
        self.taken[i] || self.used[i].is_some_and(|u| u.exclusive > 0)
    }

    pub(super) fn has_room(&self, i: usize, demand: &BTreeMap<String, Quantity>) -> bool {
        let used = self.used[i].map(|u| &u.consumed);
        capacity::exceeded(demand, self.candidates[i].device, used, self.planned[i].as_ref()).is_none()
    }

    /// Takes the device unless a constraint is against it, on the attribute named then.
    pub(super) fn take(
        &mut self,
        at: At<'s>,
        i: usize,
        demand: BTreeMap<String, Quantity>,
    ) -> Result<(), &'s str> {
        let candidate = &self.candidates[i];
        let (request, subrequest) = at.name;
        let driver = &candidate.id.pool.driver;
        self.constraints[at.claim].add(request, subrequest, driver, candidate.device)?;
        let consumed = if candidate.device.shared {
            let planned = self.planned[i].get_or_insert_default();
            for (name, amount) in &demand {
                let sum = planned.entry(name.clone()).or_default();
                *sum = sum.checked_add(*amount).unwrap_or(*sum);
            }
            demand
        } else {
            self.taken[i] = true;
            BTreeMap::new()
        };
        let (request, alternative) = (at.request, at.alternative);
        self.chosen[at.claim].push(Chosen { request, alternative, candidate: candidate.clone(), consumed });
        Ok(())
    }

    /// Takes back the device taken last, which is candidate `i`.
    pub(super) fn give_back(&mut self, at: At<'s>, i: usize) {
        let Some(last) = self.chosen[at.claim].pop() else { return };
        if self.candidates[i].device.shared {
            if let Some(planned) = &mut self.planned[i] {
                for (name, amount) in &last.consumed {
                    if let Some(sum) = planned.get_mut(name) {
                        *sum = sum.checked_sub(*amount).unwrap_or(*sum);
                    }
                }
                if planned.values().all(Quantity::is_zero) {
                    self.planned[i] = None;
                }
            }
        } else {
            self.taken[i] = false;
        }
        let (request, subrequest) = at.name;
        self.constraints[at.claim].remove(request, subrequest);
    }

    /// Whether the two can stand for each other in everything that is still to be decided.
    pub(super) fn interchangeable(&self, a: usize, b: usize) -> bool {
        self.classes[a] == self.classes[b]
            && self.taken[a] == self.taken[b]
            && self.used[a] == self.used[b]
            && self.planned[a] == self.planned[b]
    }
}

/// What two interchangeable devices have in common, whatever is taken of them.
struct Kind<'s> {
    device: &'s Device,
    reachable: bool,
    /// What each selector says; `None` = it fails.
    selected: Vec<Option<bool>>,
    /// Attributes that constraints look at.
    attributes: Vec<Option<&'s Attribute>>,
}

impl Kind<'_> {
    fn equals(&self, other: &Self) -> bool {
        self.reachable == other.reachable
            && self.selected == other.selected
            && self.attributes == other.attributes
            && self.device.same_offer(other.device)
    }
}

/// Numbers the equivalence classes. A search for a single device gains nothing from them.
fn classes(search: &Search<'_, '_>) -> Vec<usize> {
    let wanted: u64 = search.alternatives().map(|a| a.count).sum();
    if wanted <= 1 {
        return (0..search.candidates.len()).collect();
    }
    let mut kinds: Vec<Kind<'_>> = Vec::new();
    let mut numbers = Vec::with_capacity(search.candidates.len());
    for (i, candidate) in search.candidates.iter().enumerate() {
        let kind = kind(search, i, candidate);
        let known = kinds.iter().position(|k| k.equals(&kind));
        numbers.push(known.unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        }));
    }
    numbers
}

fn kind<'s>(search: &Search<'_, 's>, i: usize, candidate: &Candidate<'s>) -> Kind<'s> {
    let constraints = search.tasks.iter().flat_map(|t| &t.claim.constraints);
    let attributes = constraints.map(|constraint| match &constraint.kind {
        ConstraintKind::Match(name) | ConstraintKind::Distinct(name) => {
            candidate.device.attribute(&candidate.id.pool.driver, name)
        }
        ConstraintKind::Unknown => None,
    });
    Kind {
        device: candidate.device,
        reachable: candidate.reachable,
        selected: search.alternatives().map(|a| a.selects(candidate, i).ok()).collect(),
        attributes: attributes.collect(),
    }
}
