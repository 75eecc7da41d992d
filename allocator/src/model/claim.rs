//! ResourceClaims that are not allocated yet.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::DeviceClaimConfiguration;
use tessera_api::GpuConfig;
use tessera_api::names::{ClaimName, ClaimUid, DeviceClassName, Namespace, RequestName};
use tessera_api::quantity::Quantity;

use super::NameMap;
use super::class::DeviceSelector;
use super::device::Toleration;

/// A ResourceClaim that is not allocated.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    /// UID of the claim.
    pub uid: ClaimUid,
    /// Namespace of the claim.
    pub namespace: Namespace,
    /// Name of the claim.
    pub name: ClaimName,
    /// Requests, in the order of the spec. Equal claims may share them.
    pub requests: Arc<[Request]>,
    /// Constraints over the devices of the claim.
    pub constraints: Vec<Constraint>,
    /// Configurations in the order of the spec. Those of other drivers are ignored.
    pub configs: Vec<DeviceClaimConfiguration>,
    /// Parameters of the namespace, for fields that neither the claim nor a class sets.
    pub defaults: Option<Arc<GpuConfig>>,
}

impl Claim {
    /// Returns true if a request names this DeviceClass.
    pub(crate) fn has_class(&self, name: &DeviceClassName) -> bool {
        let mut alternatives = self.requests.iter().flat_map(|request| &request.alternatives);
        alternatives.any(|alternative| alternative.class.as_ref() == Some(name))
    }

    /// Returns true if the claim has one request, for one GPU.
    pub fn is_for_one_gpu(&self) -> bool {
        let is_one = |alternative: &Alternative| alternative.mode == AllocationMode::Exact(1);
        matches!(&*self.requests, [one] if one.alternatives.iter().all(is_one))
    }

    /// Returns the size of the selectors of all requests, in bytes.
    pub fn selector_bytes(&self) -> usize {
        let alternatives = self.requests.iter().flat_map(|request| &request.alternatives);
        alternatives
            .flat_map(|alternative| &alternative.selectors)
            .map(|s| s.expression.len())
            .sum()
    }
}

/// A request: its alternatives in order of preference.
///
/// A request with `exactly` has one alternative; a request with `firstAvailable` has one per
/// subrequest.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request {
    /// Name of the request (`requests[].name`).
    pub name: RequestName,
    /// Alternatives in order of preference; exactly one of them is allocated.
    pub alternatives: Vec<Alternative>,
}

/// An alternative of a request: the `exactly` part or one subrequest.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Alternative {
    /// Name in allocation results: `request` or `request/subrequest`.
    pub name: RequestName,
    /// DeviceClass; `None` if the request has an unknown type without a class.
    pub class: Option<DeviceClassName>,
    /// Selectors that must all match, in addition to those of the class.
    pub selectors: Vec<DeviceSelector>,
    /// Number of devices.
    pub mode: AllocationMode,
    /// Tolerated device taints.
    pub tolerations: Vec<Toleration>,
    /// `capacity.requests`: share of a shared device, lower bound of an exclusive one.
    pub capacity: NameMap<Quantity>,
    /// `adminAccess`, if set. Administrative access consumes no capacity.
    pub admin: Option<bool>,
    /// Name of an unsupported feature; a claim that uses one is refused with this name.
    pub unsupported: Option<&'static str>,
}

/// Number of devices of a request (`allocationMode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AllocationMode {
    /// A fixed number of devices.
    Exact(u64),
    /// All matching devices of one node.
    All,
    /// An unknown allocation mode of a later API version.
    Unknown,
}

/// A constraint over the devices of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Constraint {
    /// Names of the requests that it applies to; empty means all.
    pub requests: Vec<String>,
    /// Required relation between the devices.
    pub kind: ConstraintKind,
}

/// Required relation between the devices of a constraint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ConstraintKind {
    /// All devices have the attribute, with equal values.
    Match(String),
    /// All devices have the attribute, with pairwise different values.
    Distinct(String),
    /// An unknown constraint of a later API version.
    Unknown,
}
