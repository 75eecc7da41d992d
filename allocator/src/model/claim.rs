//! Claims that wait for devices.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::DeviceClaimConfiguration;
use tessera_api::names::{ClaimName, ClaimUid, DeviceClassName, Namespace, RequestName};
use tessera_api::quantity::Quantity;

use super::class::Selector;
use super::device::Toleration;

/// A ResourceClaim that is not allocated.
#[derive(Debug, Clone)]
pub struct Claim {
    /// Its UID.
    pub uid: ClaimUid,
    /// Its namespace.
    pub namespace: Namespace,
    /// Its name.
    pub name: ClaimName,
    /// What it asks for, in order.
    pub requests: Vec<Request>,
    /// How its devices must relate.
    pub constraints: Vec<Constraint>,
    /// Its configurations, in the order given; those of other drivers are left alone.
    pub configs: Vec<DeviceClaimConfiguration>,
}

impl Claim {
    /// Bytes of the selectors of all requests, which the tenant writes.
    pub fn selector_bytes(&self) -> usize {
        let alternatives = self.requests.iter().flat_map(|request| &request.alternatives);
        alternatives
            .flat_map(|alternative| &alternative.selectors)
            .map(|s| s.expression.len())
            .sum()
    }
}

/// One request: its alternatives in order of preference. A request of `exactly` has one, a request
/// of `firstAvailable` several.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request {
    /// Its name (`requests[].name`).
    pub name: RequestName,
    /// One of them is served.
    pub alternatives: Vec<Alternative>,
}

/// One way to serve a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Alternative {
    /// What results call it: the request's name, or `request/subrequest`.
    pub name: RequestName,
    /// Its class; empty where the request is of a kind we do not know.
    pub class: Option<DeviceClassName>,
    /// All must match, besides those of the class.
    pub selectors: Vec<Selector>,
    /// How many.
    pub mode: Mode,
    /// Tolerated device taints.
    pub tolerations: Vec<Toleration>,
    /// `capacity.requests`: share of a shared device, lower bound of an exclusive one.
    pub capacity: BTreeMap<String, Quantity>,
    /// `adminAccess`, where given: for those who look after devices that others use; takes nothing
    /// from them.
    pub admin: Option<bool>,
    /// A feature that this version does not have; the claim is refused with its name.
    pub unsupported: Option<&'static str>,
}

/// How many devices a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// So many.
    Exact(u64),
    /// All that match, on one node.
    All,
    /// A mode of the future.
    Unknown,
}

/// A constraint over the devices of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Constraint {
    /// The requests it binds; empty = all.
    pub requests: Vec<String>,
    /// What it demands.
    pub kind: ConstraintKind,
}

/// What a constraint demands.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ConstraintKind {
    /// The attribute is there on all of them, with the same value.
    Match(String),
    /// The attribute is there on all of them, with different values.
    Distinct(String),
    /// A constraint of the future.
    Unknown,
}
