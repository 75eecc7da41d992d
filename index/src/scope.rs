//! Scope: the drivers whose devices a claim requests.
//!
//! Nothing in a claim names a driver, so the scope follows from the selectors of its classes and
//! requests. It has to be known before anything is allocated, because a claim is allocated as a
//! whole, and by one allocator.

use tessera_allocator::model::{Alternative, Claim, DeviceClass, DeviceSelector};
use tessera_allocator::selector::DriverCondition;
use tessera_api::names::{DeviceClassName, ManagedDrivers};

/// The drivers whose devices a claim requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Managed drivers only.
    Ours,
    /// Any driver: managed ones fit, and others do too.
    Any,
    /// Other drivers only.
    Foreign,
    /// Managed drivers in one request or alternative, others in another.
    Mixed,
}

/// Returns the scope of a claim. `class` looks up a class. One that does not exist counts as any
/// driver's, so that we report it.
pub(crate) fn of_claim<'c>(
    claim: &Claim,
    class: impl Fn(&DeviceClassName) -> Option<&'c DeviceClass>,
    managed: &ManagedDrivers,
) -> Scope {
    let alternatives = claim.requests.iter().flat_map(|r| &r.alternatives);
    let of_one = |a: &Alternative| of_alternative(a, a.class.as_ref().and_then(&class), managed);
    let mut scopes = alternatives.map(of_one);
    let first = scopes.next().unwrap_or(Scope::Foreign);
    scopes.fold(first, join)
}

/// The class is read first: an administrator writes it, and where it names managed drivers only,
/// the selectors of the request, which any tenant writes, do not have to be compiled.
fn of_alternative(
    request: &Alternative,
    class: Option<&DeviceClass>,
    managed: &ManagedDrivers,
) -> Scope {
    if request.class.is_some() && class.is_none() {
        return Scope::Any;
    }
    let of_class = selected(class.map_or(&[], |class| &class.selectors), managed);
    if !of_class.managed {
        return Scope::Foreign;
    }
    if !of_class.other {
        return Scope::Ours;
    }
    let of_request = selected(&request.selectors, managed);
    if !of_request.managed {
        Scope::Foreign
    } else if of_class.unnamed && of_request.unnamed {
        Scope::Any
    } else {
        Scope::Ours
    }
}

/// The drivers whose devices selectors may select.
#[derive(Clone, Copy)]
struct Selected {
    /// One that is managed.
    managed: bool,
    /// One that no selector names.
    unnamed: bool,
    /// One that is not managed, named or not.
    other: bool,
}

/// Returns the drivers whose devices all of the selectors together may select. `other` may be true
/// where each selector selects another unmanaged driver, which costs less to find out.
fn selected(selectors: &[DeviceSelector], managed: &ManagedDrivers) -> Selected {
    let compiled: Vec<_> = selectors.iter().filter_map(|one| one.compiled().ok()).collect();
    let all = |holds: &dyn Fn(&DriverCondition) -> bool| {
        compiled.iter().all(|selector| holds(selector.drivers()))
    };
    let is_other = |driver: &str| !managed.contains(driver);
    Selected {
        managed: managed.iter().any(|driver| all(&|one| one.may_match(driver.as_str()))),
        unnamed: all(&DriverCondition::matches_unnamed),
        other: all(&|one| one.matches_unnamed() || one.named().any(is_other)),
    }
}

fn join(a: Scope, b: Scope) -> Scope {
    match (a, b) {
        (a, b) if a == b => a,
        (Scope::Mixed, _) | (_, Scope::Mixed) => Scope::Mixed,
        (Scope::Any, other) | (other, Scope::Any) => other,
        _ => Scope::Mixed,
    }
}
