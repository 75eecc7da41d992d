//! Scope: the drivers whose devices a claim requests.
//!
//! Nothing in a claim names a driver, so the scope follows from the selectors of its classes and
//! requests. It has to be known before anything is allocated, because a claim is allocated as a
//! whole, and no allocator can allocate devices of several drivers.

use tessera_allocator::model::{Alternative, Claim, DeviceClass, DeviceSelector};
use tessera_allocator::selector::MatchableDrivers;
use tessera_api::names::DeviceClassName;

/// The drivers whose devices a claim requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Our driver only.
    Ours,
    /// Any driver: ours fits, and others do too.
    Any,
    /// Other drivers only.
    Foreign,
    /// Our driver in one request or alternative, others in another.
    Mixed,
}

/// Returns the scope of a claim. `class` looks up a class. One that does not exist counts as any
/// driver's, so that we report it.
pub(crate) fn of_claim<'c>(
    claim: &Claim,
    class: impl Fn(&DeviceClassName) -> Option<&'c DeviceClass>,
) -> Scope {
    let alternatives = claim.requests.iter().flat_map(|r| &r.alternatives);
    let mut scopes = alternatives.map(|a| of_alternative(a, a.class.as_ref().and_then(&class)));
    let first = scopes.next().unwrap_or(Scope::Foreign);
    scopes.fold(first, join)
}

/// The class is read first: an administrator writes it, and where it names our driver only, the
/// selectors of the request, which any tenant writes, do not have to be compiled.
fn of_alternative(request: &Alternative, class: Option<&DeviceClass>) -> Scope {
    if request.class.is_some() && class.is_none() {
        return Scope::Any;
    }
    let of_class = drivers(class.map_or(&[], |class| &class.selectors));
    if !of_class.tessera {
        return Scope::Foreign;
    }
    if !of_class.other {
        return Scope::Ours;
    }
    let of_request = drivers(&request.selectors);
    if !of_request.tessera {
        Scope::Foreign
    } else if of_class.unnamed && of_request.unnamed {
        Scope::Any
    } else {
        Scope::Ours
    }
}

/// Returns the drivers whose devices all of the selectors together may select.
fn drivers(selectors: &[DeviceSelector]) -> MatchableDrivers {
    let any = MatchableDrivers { tessera: true, unnamed: true, other: true };
    selectors.iter().filter_map(|selector| selector.compiled().ok()).fold(any, |all, compiled| {
        let drivers = compiled.drivers();
        MatchableDrivers {
            tessera: all.tessera && drivers.tessera,
            unnamed: all.unnamed && drivers.unnamed,
            other: all.other && drivers.other,
        }
    })
}

fn join(a: Scope, b: Scope) -> Scope {
    match (a, b) {
        (a, b) if a == b => a,
        (Scope::Mixed, _) | (_, Scope::Mixed) => Scope::Mixed,
        (Scope::Any, other) | (other, Scope::Any) => other,
        _ => Scope::Mixed,
    }
}
