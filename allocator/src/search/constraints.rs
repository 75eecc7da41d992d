//! State of the constraints of a claim while the search adds and removes devices.

use std::collections::BTreeSet;

use crate::cluster::{Interner, ReachableDevices, ValueId};
use crate::features::FeatureGates;
use crate::model::{Attribute, ConstraintKind};
use crate::shape::ConstraintShape;

/// A constraint and the values of its current devices.
pub(super) struct ConstraintState<'a> {
    constraint: &'a ConstraintShape,
    /// Attribute value of every candidate.
    candidate_values: Vec<ValueId>,
    /// Values of the current devices, in order.
    values: Vec<ValueId>,
    /// With list attributes: the common elements after each of the current devices.
    common: Vec<BTreeSet<Attribute>>,
}

impl<'a> ConstraintState<'a> {
    pub(super) fn new(
        constraint: &'a ConstraintShape,
        reachable: &ReachableDevices,
        interner: &mut Interner,
    ) -> Self {
        let name = constraint.attribute().unwrap_or_default();
        let id = name.contains('/').then(|| interner.name(name));
        let value = |candidate: &crate::cluster::Candidate| {
            let compiled = candidate.compiled();
            match id.filter(|_| !compiled.is_irregular) {
                Some(id) => compiled.attribute(id),
                None => {
                    let value = compiled.device.attribute(&candidate.slice().pool.driver, name);
                    value.and_then(|value| interner.known_value(value)).unwrap_or(ValueId::ABSENT)
                }
            }
        };
        let candidate_values = reachable.candidates.iter().map(value).collect();
        Self { constraint, candidate_values, values: Vec::new(), common: Vec::new() }
    }

    pub(super) fn attribute(&self) -> &str {
        self.constraint.attribute().unwrap_or_default()
    }

    /// Returns true if it applies to an alternative of its claim.
    pub(super) fn applies_to(&self, index: usize) -> bool {
        self.constraint.applies_to[index]
    }

    /// Returns the attribute value of a candidate.
    pub(super) fn value(&self, i: usize) -> ValueId {
        self.candidate_values[i]
    }

    /// Returns the values of the current devices.
    pub(super) fn values(&self) -> &[ValueId] {
        &self.values
    }

    /// Returns true if the order of the current devices does not matter.
    pub(super) fn is_match(&self) -> bool {
        matches!(self.constraint.constraint.kind, ConstraintKind::Match(_))
    }

    /// Adds the candidate. Returns false without a change if it violates the constraint.
    pub(super) fn add(
        &mut self,
        index: usize,
        i: usize,
        interner: &Interner,
        features: &FeatureGates,
    ) -> bool {
        if !self.applies_to(index) {
            return true;
        }
        let value = self.candidate_values[i];
        if value == ValueId::ABSENT {
            return false;
        }
        let admitted = match features.list_attributes {
            true => self.admits_set(value, interner),
            false => self.admits(value, interner),
        };
        if admitted {
            self.values.push(value);
        }
        admitted
    }

    pub(super) fn remove(&mut self, index: usize) {
        if self.applies_to(index) {
            self.values.pop();
            self.common.truncate(self.values.len());
        }
    }

    /// Tests a value. The first device only needs the attribute; a list equals no value.
    fn admits(&self, value: ValueId, interner: &Interner) -> bool {
        let Some(first) = self.values.first() else { return true };
        let is_list = matches!(
            interner.value_of(value),
            None | Some(Attribute::List(_) | Attribute::Unknown)
        );
        !is_list && if self.is_match() { *first == value } else { !self.values.contains(&value) }
    }

    /// Tests a value with the gate `DRAListTypeAttributes`: all devices share an element, or no two
    /// do.
    fn admits_set(&mut self, value: ValueId, interner: &Interner) -> bool {
        let Some(set) = set_of(value, interner) else { return false };
        if self.is_match() {
            let common = match self.common.last() {
                Some(common) => common.intersection(&set).cloned().collect(),
                None => set,
            };
            let admitted = !common.is_empty();
            if admitted {
                self.common.push(common);
            }
            return admitted;
        }
        let mut others = self.values.iter().filter_map(|other| set_of(*other, interner));
        others.all(|other| other.is_disjoint(&set))
    }
}

/// Returns a value as a set: a scalar has one element.
fn set_of(value: ValueId, interner: &Interner) -> Option<BTreeSet<Attribute>> {
    match interner.value_of(value)? {
        Attribute::List(items) => (!items.is_empty()).then(|| items.iter().cloned().collect()),
        Attribute::Unknown => None,
        scalar => Some(BTreeSet::from([scalar.clone()])),
    }
}
