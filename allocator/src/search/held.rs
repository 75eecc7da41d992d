//! Constraints over the devices of a claim, while the search adds and takes back devices.

use std::collections::BTreeSet;

use crate::cluster::{Interner, Reach, ValueId};
use crate::features::Features;
use crate::model::{Attribute, ConstraintKind};
use crate::shape::ConstraintShape;

/// A constraint and the devices it holds.
pub(super) struct Held<'a> {
    constraint: &'a ConstraintShape,
    /// The attribute's value on every candidate.
    of: Vec<ValueId>,
    /// Values of the devices held, in order.
    values: Vec<ValueId>,
    /// With lists as sets: what the devices held have in common, after each of them.
    common: Vec<BTreeSet<Attribute>>,
}

impl<'a> Held<'a> {
    pub(super) fn new(
        constraint: &'a ConstraintShape,
        reach: &Reach,
        interner: &mut Interner,
    ) -> Self {
        let name = constraint.attribute().unwrap_or_default();
        let id = name.contains('/').then(|| interner.name(name));
        let value = |candidate: &crate::cluster::Candidate| {
            let compiled = candidate.compiled();
            match id.filter(|_| !compiled.irregular) {
                Some(id) => compiled.attribute(id),
                None => {
                    let value = compiled.device.attribute(&candidate.slice().pool.driver, name);
                    value.and_then(|value| interner.known_value(value)).unwrap_or(ValueId::ABSENT)
                }
            }
        };
        let of = reach.candidates.iter().map(value).collect();
        Self { constraint, of, values: Vec::new(), common: Vec::new() }
    }

    pub(super) fn attribute(&self) -> &str {
        self.constraint.attribute().unwrap_or_default()
    }

    /// Whether it binds an alternative of its claim.
    pub(super) fn binds(&self, place: usize) -> bool {
        self.constraint.binds[place]
    }

    /// The attribute's value on a candidate.
    pub(super) fn value(&self, i: usize) -> ValueId {
        self.of[i]
    }

    /// The values of the devices held.
    pub(super) fn values(&self) -> &[ValueId] {
        &self.values
    }

    /// Whether the order of the devices held makes no difference to what it admits.
    pub(super) fn is_match(&self) -> bool {
        matches!(self.constraint.constraint.kind, ConstraintKind::Match(_))
    }

    /// Adds the candidate. `false` = it is not admitted, and nothing has changed.
    pub(super) fn add(
        &mut self,
        place: usize,
        i: usize,
        interner: &Interner,
        features: &Features,
    ) -> bool {
        if !self.binds(place) {
            return true;
        }
        let value = self.of[i];
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

    pub(super) fn remove(&mut self, place: usize) {
        if self.binds(place) {
            self.values.pop();
            self.common.truncate(self.values.len());
        }
    }

    /// The first device only needs to have the attribute; lists equal nothing.
    fn admits(&self, value: ValueId, interner: &Interner) -> bool {
        let Some(first) = self.values.first() else { return true };
        let is_list = matches!(
            interner.value_of(value),
            None | Some(Attribute::List(_) | Attribute::Unknown)
        );
        !is_list && if self.is_match() { *first == value } else { !self.values.contains(&value) }
    }

    /// The same with the gate `DRAListTypeAttributes`: all have a value in common, or no two have
    /// one.
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

/// A value as a set: a scalar has one element.
fn set_of(value: ValueId, interner: &Interner) -> Option<BTreeSet<Attribute>> {
    match interner.value_of(value)? {
        Attribute::List(items) => (!items.is_empty()).then(|| items.iter().cloned().collect()),
        Attribute::Unknown => None,
        scalar => Some(BTreeSet::from([scalar.clone()])),
    }
}
