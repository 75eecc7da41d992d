//! Whose devices a claim asks for.
//!
//! Nothing in a claim names a driver, so this is read off the selectors of its classes and requests. It must be known before
//! anything is allocated, because a claim that asks several drivers can be allocated by nobody as a whole.

use tessera_allocator::model::{Alternative, Claim, DeviceClass, Selector};
use tessera_allocator::selector::DriverVerdict;
use tessera_api::names::{DRIVER_NAME, DeviceClassName};

/// A driver that does not exist: a selector that may select its devices asks for no driver in particular.
const NOBODY: &str = "nobody.invalid";

/// Whose devices a claim asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Ours, and nobody else's.
    Ours,
    /// Those of any driver: ours will do, and so would others.
    Any,
    /// Those of others.
    Foreign,
    /// Ours in one request or alternative, those of others in another.
    Mixed,
}

/// The scope of a claim, given how to look up a class. A class that is not there is taken for ours: it is us then who say so.
pub(crate) fn of_claim<'c>(
    claim: &Claim,
    class: impl Fn(&DeviceClassName) -> Option<&'c DeviceClass>,
) -> Scope {
    let alternatives = claim.requests.iter().flat_map(|r| &r.alternatives);
    let mut scopes = alternatives.map(|a| of_alternative(a, a.class.as_ref().and_then(&class)));
    let first = scopes.next().unwrap_or(Scope::Foreign);
    scopes.fold(first, join)
}

fn of_alternative(request: &Alternative, class: Option<&DeviceClass>) -> Scope {
    if request.class.is_some() && class.is_none() {
        return Scope::Any;
    }
    let selectors = || class.into_iter().flat_map(|c| &c.selectors).chain(&request.selectors);
    if never(selectors(), DRIVER_NAME) {
        Scope::Foreign
    } else if never(selectors(), NOBODY) {
        Scope::Ours
    } else {
        Scope::Any
    }
}

fn never<'a>(mut selectors: impl Iterator<Item = &'a Selector>, driver: &str) -> bool {
    selectors.any(|s| s.compiled.as_ref().is_ok_and(|c| c.verdict_on_driver(driver) == DriverVerdict::Never))
}

fn join(a: Scope, b: Scope) -> Scope {
    match (a, b) {
        (a, b) if a == b => a,
        (Scope::Mixed, _) | (_, Scope::Mixed) => Scope::Mixed,
        (Scope::Any, other) | (other, Scope::Any) => other,
        _ => Scope::Mixed,
    }
}
