//! Lists of selectors, each evaluated once for all devices with equal relevant properties.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::cluster::{Candidate, CompiledDevice, FastMap, Interner, NameId};
use crate::model::{Claim, DeviceSelector};
use crate::selector::{DeviceView, Read, Reads, SelectorError};

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
}

#[derive(Debug)]
struct List {
    selectors: Vec<DeviceSelector>,
    reads: ListReads,
    answers: FastMap<Box<[u32]>, Result<bool, SelectorError>>,
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

    /// Returns true if all selectors of the list match the candidate. Evaluation charges `steps`; a
    /// cached result is free.
    pub(crate) fn selects(
        &mut self,
        selection: Selection,
        candidate: &Candidate,
        interner: &mut Interner,
        steps: &mut u64,
    ) -> Result<bool, SelectorError> {
        let list = &mut self.lists[selection.0];
        if list.selectors.is_empty() {
            return Ok(true);
        }
        list.resolve(interner, steps);
        let device = candidate.compiled();
        if device.is_irregular {
            self.evaluations += 1;
            return list.evaluate(candidate, steps);
        }
        self.key.clear();
        list.key(candidate.driver, device, interner, &mut self.key);
        if let Some(known) = list.answers.get(self.key.as_slice()) {
            return known.clone();
        }
        self.evaluations += 1;
        let answer = list.evaluate(candidate, steps);
        list.answers.insert(self.key.as_slice().into(), answer.clone());
        self.answers += 1;
        if self.answers > MAX_ANSWERS {
            self.lists.iter_mut().for_each(|list| list.answers = FastMap::default());
            self.answers = 0;
        }
        answer
    }
}

impl List {
    fn resolve(&mut self, interner: &mut Interner, steps: &mut u64) {
        if !matches!(self.reads, ListReads::Unresolved) {
            return;
        }
        let Some(reads) = reads(&self.selectors, steps) else {
            self.reads = ListReads::Everything;
            return;
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

    fn evaluate(&self, candidate: &Candidate, steps: &mut u64) -> Result<bool, SelectorError> {
        let (driver, device) = (&candidate.slice().pool.driver, candidate.device());
        for selector in &self.selectors {
            let compiled = selector.compiled_in(steps)?;
            let view = device.view.get_or_init(|| DeviceView::new(driver, device));
            let (selected, work) = compiled.evaluate(view);
            *steps = steps.saturating_sub(work / WORK_PER_STEP);
            if !selected? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns the properties that the selectors read together; `None` means everything. A selector
/// that does not compile reads nothing.
fn reads(selectors: &[DeviceSelector], steps: &mut u64) -> Option<BTreeSet<Read>> {
    let mut all = BTreeSet::new();
    for compiled in selectors.iter().filter_map(|selector| selector.compiled_in(steps).ok()) {
        match compiled.reads() {
            Reads::Everything => return None,
            Reads::These(reads) => all.extend(reads.iter().cloned()),
        }
    }
    Some(all)
}
