//! Lists of selectors, each evaluated once for all devices with equal relevant properties.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::cluster::{Candidate, CompiledDevice, FastMap, Interner, NameId};
use crate::model::{Claim, DeviceSelector};
use crate::selector::{CompiledSelector, DeviceView, Read, Reads, SelectorError};

/// Index of a list of selectors in [`Selections`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Selection(usize);

/// Maximum number of cached results of all lists, about 100 bytes each. Beyond it all are dropped.
const MAX_ANSWERS: usize = 1_000_000;

/// Units of evaluation work that count as one step of a search.
///
/// A step takes about 0.5 us, a unit of work 26 ns (optimized, on a core of a small virtual
/// machine).
const WORK_PER_STEP: u64 = 20;

/// Maximum number of lists. Beyond it all are dropped, and created again when needed.
const MAX_SELECTIONS: usize = 20_000;

/// Maximum size of the selectors of all cached shapes, in bytes. Selectors are written by tenants,
/// so the size is limited. Beyond it all shapes and lists are dropped.
const MAX_SELECTOR_BYTES: usize = 16 << 20;

/// All lists of selectors in use, and their cached results.
#[derive(Debug, Default)]
pub(crate) struct Selections {
    lists: Vec<List>,
    by_source: FastMap<Vec<Arc<str>>, usize>,
    /// Number of cached results of all lists.
    answers: usize,
    /// Buffer for one cache key.
    key: Vec<u32>,
    /// Size of the selectors of the shapes created since the last reset, in bytes.
    bytes: usize,
    /// Number of evaluations since it was last asked for.
    evaluations: u64,
    /// Number of evaluations so far whose result was kept.
    kept: u64,
    /// Steps charged for compiling and evaluating for the present pod, also beyond those of a
    /// search.
    charged: u64,
    /// True if nothing is compiled or evaluated for the present pod.
    is_withheld: bool,
    /// Steps that were left when a result was withheld from the search; `None` if none was.
    withheld_steps: Option<u64>,
    /// True if long selectors are compiled by the caller: see [`Selections::uncompiled`].
    leaves_long: bool,
    /// The selector for which the search of the present pod ended, because it is not compiled.
    uncompiled: Option<Arc<str>>,
}

#[derive(Debug)]
struct List {
    selectors: Vec<DeviceSelector>,
    reads: ListReads,
    answers: FastMap<Box<[u32]>, Answer>,
}

/// Result of [`Selections::selects`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Selects {
    Yes,
    No,
    /// A selector failed.
    Failed(SelectorError),
    /// The steps have ended before the result is known; none are left.
    OutOfSteps,
}

impl From<Result<bool, SelectorError>> for Selects {
    fn from(result: Result<bool, SelectorError>) -> Self {
        match result {
            Ok(true) => Self::Yes,
            Ok(false) => Self::No,
            Err(error) => Self::Failed(error),
        }
    }
}

/// Result of a list of selectors for devices with equal relevant properties.
#[derive(Debug)]
enum Answer {
    Known(Result<bool, SelectorError>),
    /// The steps ended after this number of selectors, all of which select the devices.
    Passed(usize),
}

/// Properties of a device that a list of selectors reads.
#[derive(Debug)]
enum ListReads {
    Everything,
    These {
        driver: bool,
        profile: bool,
        attributes: Vec<NameId>,
        domains: Vec<String>,
    },
    /// Unknown until the selectors are compiled.
    Unresolved,
}

impl Selections {
    /// Returns true if the caches are full and should be reset.
    pub(crate) fn is_full(&self) -> bool {
        self.lists.len() > MAX_SELECTIONS || self.bytes > MAX_SELECTOR_BYTES
    }

    /// Begins the search for a pod. If `is_withheld`, only known results of selectors are used: a
    /// test without one ends the steps.
    pub(crate) fn begin_pod(&mut self, is_withheld: bool) {
        (self.is_withheld, self.withheld_steps, self.charged) = (is_withheld, None, 0);
        self.uncompiled = None;
    }

    /// Removes all lists and results. What is charged to the present pod and withheld from it
    /// stays.
    pub(crate) fn clear(&mut self) {
        self.lists = Vec::new();
        self.by_source = FastMap::default();
        (self.answers, self.bytes) = (0, 0);
    }

    /// Leaves the compilation of long selectors to the caller. A search that needs one ends like
    /// that of a withheld pod.
    pub(crate) fn leave_long_selectors(&mut self) {
        self.leaves_long = true;
    }

    /// Returns the selector that has to be compiled before the search for the pod continues.
    pub(crate) fn uncompiled(&self) -> Option<&Arc<str>> {
        self.uncompiled.as_ref()
    }

    /// Returns true if the search for the pod ended because nothing was to be evaluated for it, or
    /// because a selector is not compiled.
    pub(crate) fn was_withheld(&self) -> bool {
        self.withheld_steps.is_some()
    }

    /// Returns the steps that such a search has ended without spending them.
    pub(crate) fn withheld_steps(&self) -> u64 {
        self.withheld_steps.unwrap_or(0)
    }

    /// Ends the steps of a search without spending them.
    fn withhold(&mut self, steps: &mut u64) {
        self.withheld_steps = Some(self.withheld_steps() + std::mem::take(steps));
    }

    /// Returns the steps charged for compiling and evaluating for the pod.
    pub(crate) fn charged(&self) -> u64 {
        self.charged
    }

    /// Returns the number of evaluations so far whose result was kept.
    pub(crate) fn kept(&self) -> u64 {
        self.kept
    }

    /// Returns the number of evaluations since the last call.
    pub(crate) fn take_evaluations(&mut self) -> u64 {
        std::mem::take(&mut self.evaluations)
    }

    /// Adds the selector size of claims for which a shape is created.
    pub(crate) fn count_bytes(&mut self, claims: &[Arc<Claim>]) {
        self.bytes += claims.iter().map(|claim| claim.selector_bytes()).sum::<usize>();
    }

    /// Returns the list of these selectors, and creates it if it is new.
    pub(crate) fn of<'s>(
        &mut self,
        selectors: impl Iterator<Item = &'s DeviceSelector>,
    ) -> Selection {
        let selectors: Vec<DeviceSelector> = selectors.cloned().collect();
        let source: Vec<Arc<str>> = selectors.iter().map(|s| Arc::clone(&s.expression)).collect();
        if let Some(known) = self.by_source.get(&source) {
            return Selection(*known);
        }
        self.lists.push(List {
            reads: ListReads::Unresolved,
            selectors,
            answers: FastMap::default(),
        });
        self.by_source.insert(source, self.lists.len() - 1);
        Selection(self.lists.len() - 1)
    }

    /// Tests if all selectors of the list match the candidate. Evaluation charges `steps`; a cached
    /// result is free. Once the steps have ended, the next call continues after the selectors that
    /// were evaluated.
    pub(crate) fn selects(
        &mut self,
        selection: Selection,
        candidate: &Candidate,
        interner: &mut Interner,
        steps: &mut u64,
    ) -> Selects {
        let list = &mut self.lists[selection.0];
        if list.selectors.is_empty() {
            return Selects::Yes;
        }
        let device = candidate.compiled();
        let mut passed = 0;
        if list.is_resolved() && !device.is_irregular {
            self.key.clear();
            list.key(candidate.driver, device, interner, &mut self.key);
            match list.answers.get(self.key.as_slice()) {
                Some(Answer::Known(known)) => return known.clone().into(),
                Some(Answer::Passed(known)) => passed = *known,
                None => {}
            }
        }
        if self.is_withheld {
            self.withhold(steps);
        }
        if *steps == 0 {
            return Selects::OutOfSteps;
        }
        if self.leaves_long
            && let Some(uncompiled) = self.lists[selection.0].uncompiled(passed)
        {
            self.uncompiled.get_or_insert(uncompiled);
            self.withhold(steps);
            return Selects::OutOfSteps;
        }
        let list = &mut self.lists[selection.0];
        let mut charge = Charge { steps, charged: &mut self.charged };
        if !list.is_resolved() {
            self.kept += 1;
            if !list.resolve(interner, &mut charge) {
                return Selects::OutOfSteps;
            }
            return self.selects(selection, candidate, interner, steps);
        }
        self.evaluations += 1;
        if device.is_irregular {
            return list.evaluate_all(candidate, &mut charge).into();
        }
        let answer = list.evaluate(passed, candidate, &mut charge);
        let selects = match &answer {
            Answer::Known(known) => known.clone().into(),
            Answer::Passed(_) => Selects::OutOfSteps,
        };
        let is_new = list.answers.insert(self.key.as_slice().into(), answer).is_none();
        self.count_kept(is_new);
        selects
    }

    /// Returns the attributes that the list reads; `None` if it is not known, or if the list reads
    /// more than values of attributes.
    pub(super) fn attributes(&self, selection: Selection) -> Option<&[NameId]> {
        let list = &self.lists[selection.0];
        match &list.reads {
            _ if list.selectors.is_empty() => Some(&[]),
            ListReads::These { attributes, domains, .. } if domains.is_empty() => Some(attributes),
            _ => None,
        }
    }

    /// Counts a result that is kept, and drops all if there are too many.
    fn count_kept(&mut self, is_new: bool) {
        self.kept += 1;
        self.answers += usize::from(is_new);
        if self.answers > MAX_ANSWERS {
            self.lists.iter_mut().for_each(|list| list.answers = FastMap::default());
            self.answers = 0;
        }
    }
}

/// The steps that compiling and evaluating are charged to.
struct Charge<'s> {
    /// Steps of the search.
    steps: &'s mut u64,
    /// Steps charged so far.
    charged: &'s mut u64,
}

impl Charge<'_> {
    fn add(&mut self, steps: u64) {
        *self.steps = self.steps.saturating_sub(steps);
        *self.charged = self.charged.saturating_add(steps);
    }

    fn has_ended(&self) -> bool {
        *self.steps == 0
    }

    /// Compiles a selector, or returns the cached program.
    fn compile(
        &mut self,
        selector: &DeviceSelector,
    ) -> Result<Arc<CompiledSelector>, SelectorError> {
        let mut left = u64::MAX;
        let compiled = selector.compiled_in(&mut left);
        self.add(u64::MAX - left);
        compiled
    }
}

impl List {
    fn is_resolved(&self) -> bool {
        !matches!(self.reads, ListReads::Unresolved)
    }

    /// Returns the first long selector after the first `passed` that is not compiled.
    fn uncompiled(&self, passed: usize) -> Option<Arc<str>> {
        let mut expressions = self.selectors.iter().skip(passed).map(|s| &s.expression);
        expressions.find(|e| CompiledSelector::is_long_and_uncompiled(e)).cloned()
    }

    /// Compiles the selectors. Returns false if the steps have ended before: the compiled ones are
    /// kept.
    fn resolve(&mut self, interner: &mut Interner, charge: &mut Charge<'_>) -> bool {
        let Some(reads) = reads(&self.selectors, charge) else { return false };
        let Reads::These(reads) = reads else {
            self.reads = ListReads::Everything;
            return true;
        };
        let mut attributes = Vec::new();
        let mut domains = Vec::new();
        for read in &reads {
            match read {
                Read::Attribute(name) => attributes.push(interner.name(name)),
                Read::Domain(domain) => domains.push(domain.clone()),
                Read::Driver | Read::Profile => {}
            }
        }
        let (driver, profile) = (reads.contains(&Read::Driver), reads.contains(&Read::Profile));
        self.reads = ListReads::These { driver, profile, attributes, domains };
        true
    }

    /// Appends the properties of the device that determine the result, as interned numbers.
    fn key(&self, driver: u32, device: &CompiledDevice, interner: &Interner, key: &mut Vec<u32>) {
        let ListReads::These { driver: reads_driver, profile, attributes, domains } = &self.reads
        else {
            key.extend([driver, device.profile.number()]);
            key.extend(
                device
                    .attributes()
                    .iter()
                    .flat_map(|(name, value)| [name.number(), value.number()]),
            );
            return;
        };
        // A capacity without a domain belongs to the domain of its driver.
        if *reads_driver || *profile {
            key.push(driver);
        }
        if *profile {
            key.push(device.profile.number());
        }
        key.extend(attributes.iter().map(|name| device.attribute(*name).number()));
        let is_in = |domain: &str| {
            device.attributes().iter().any(|(name, _)| interner.domain(*name) == domain)
        };
        key.extend(domains.iter().map(|domain| u32::from(is_in(domain))));
    }

    /// Evaluates the selectors after the first `passed` until the steps end.
    fn evaluate(&self, passed: usize, candidate: &Candidate, charge: &mut Charge<'_>) -> Answer {
        for (at, selector) in self.selectors.iter().enumerate().skip(passed) {
            match evaluate(selector, candidate, charge) {
                Ok(true) if charge.has_ended() && at + 1 < self.selectors.len() => {
                    return Answer::Passed(at + 1);
                }
                Ok(true) => {}
                known => return Answer::Known(known),
            }
        }
        Answer::Known(Ok(true))
    }

    /// Evaluates the selectors, whatever they cost: the result is not kept.
    fn evaluate_all(
        &self,
        candidate: &Candidate,
        charge: &mut Charge<'_>,
    ) -> Result<bool, SelectorError> {
        for selector in &self.selectors {
            if !evaluate(selector, candidate, charge)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Evaluates one selector.
fn evaluate(
    selector: &DeviceSelector,
    candidate: &Candidate,
    charge: &mut Charge<'_>,
) -> Result<bool, SelectorError> {
    let (driver, device) = (&candidate.slice().pool.driver, candidate.device());
    let compiled = charge.compile(selector)?;
    let view = device.view.get_or_init(|| DeviceView::new(driver, device));
    let (selected, work) = compiled.evaluate(view);
    charge.add(work / WORK_PER_STEP);
    selected
}

/// Returns the properties that the selectors read together; `None` if the steps have ended before
/// all were compiled. A selector that does not compile reads nothing.
fn reads(selectors: &[DeviceSelector], charge: &mut Charge<'_>) -> Option<Reads> {
    let mut all = BTreeSet::new();
    for (at, selector) in selectors.iter().enumerate() {
        match charge.compile(selector).as_ref().map(|compiled| compiled.reads()) {
            Ok(Reads::Everything) => return Some(Reads::Everything),
            Ok(Reads::These(reads)) => all.extend(reads.iter().cloned()),
            Err(_) => {}
        }
        if charge.has_ended() && at + 1 < selectors.len() {
            return None;
        }
    }
    Some(Reads::These(all))
}
