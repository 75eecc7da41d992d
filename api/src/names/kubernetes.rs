//! Names of Kubernetes objects and of what DRA objects name inside.

use super::macros::{kept_if, name_type};
use super::syntax::{is_dns_label, is_dns_subdomain, is_extended_resource};

name_type! {
    /// A DRA driver's name: a DNS subdomain of at most 63 bytes (`ResourceSlice.spec.driver`).
    DriverName, "driver name", at most 63,
    "a DNS subdomain: lowercase letters, digits, `-` and `.`, each part beginning and ending with a letter or digit",
    kept_if!(is_dns_subdomain)
}

impl DriverName {
    /// Our own driver, [`DRIVER_NAME`](super::DRIVER_NAME).
    pub fn ours() -> Self {
        Self::new(super::DRIVER_NAME)
            .expect("invariant: the driver's name is a DNS subdomain, checked by a test")
    }
}

name_type! {
    /// A pool of devices: DNS subdomains joined by `/`, at most 253 bytes
    /// (`ResourceSlice.spec.pool.name`). Ours is named as the node.
    PoolName, "pool name", at most 253,
    "DNS subdomains joined by `/`",
    |text| text.split('/').all(is_dns_subdomain).then(|| std::sync::Arc::from(text))
}

impl PoolName {
    /// The pool of a node's GPUs.
    pub fn of_node(node: &NodeName) -> Self {
        Self::new(node.as_str())
            .expect("invariant: a node name is one DNS subdomain and so is a pool name")
    }
}

name_type! {
    /// A node: a DNS subdomain of at most 253 bytes.
    NodeName, "node name", at most 253,
    "a DNS subdomain: lowercase letters, digits, `-` and `.`, each part beginning and ending with a letter or digit",
    kept_if!(is_dns_subdomain)
}

name_type! {
    /// A namespace: a DNS label.
    Namespace, "namespace", at most 63,
    "a DNS label: lowercase letters, digits and `-`, beginning and ending with a letter or digit",
    kept_if!(is_dns_label)
}

name_type! {
    /// An extended resource of a Node, such as `nvidia.com/gpu`: at most 317 bytes.
    ExtendedResourceName, "extended resource name", at most 317,
    "DOMAIN/NAME: a DNS subdomain, `/`, and letters, digits, `-`, `_` and `.`, beginning and ending with a letter or digit",
    kept_if!(is_extended_resource)
}

name_type! {
    /// A ResourceClaim's name: a DNS subdomain of at most 253 bytes.
    ClaimName, "ResourceClaim name", at most 253,
    "a DNS subdomain: lowercase letters, digits, `-` and `.`, each part beginning and ending with a letter or digit",
    kept_if!(is_dns_subdomain)
}

name_type! {
    /// A pod's name: a DNS subdomain of at most 253 bytes.
    PodName, "pod name", at most 253,
    "a DNS subdomain: lowercase letters, digits, `-` and `.`, each part beginning and ending with a letter or digit",
    kept_if!(is_dns_subdomain)
}

name_type! {
    /// A DeviceClass's name: a DNS subdomain of at most 253 bytes.
    DeviceClassName, "DeviceClass name", at most 253,
    "a DNS subdomain: lowercase letters, digits, `-` and `.`, each part beginning and ending with a letter or digit",
    kept_if!(is_dns_subdomain)
}

name_type! {
    /// A GpuQuota's name: a DNS subdomain of at most 253 bytes.
    QuotaName, "GpuQuota name", at most 253,
    "a DNS subdomain: lowercase letters, digits, `-` and `.`, each part beginning and ending with a letter or digit",
    kept_if!(is_dns_subdomain)
}

name_type! {
    /// A device in a pool: a DNS label, unique in the pool (`ResourceSlice.spec.devices[].name`).
    DeviceName, "device name", at most 63,
    "a DNS label: lowercase letters, digits and `-`, beginning and ending with a letter or digit",
    kept_if!(is_dns_label)
}

name_type! {
    /// A request of a claim, or `<request>/<subrequest>` for an alternative of a `firstAvailable`
    /// request; each part is a DNS label (`ResourceClaim.spec.devices.requests[].name` and what
    /// allocation results refer to).
    RequestName, "request name", at most 127,
    "a DNS label, or two of them joined by `/` (request and subrequest)",
    |text| {
        let mut parts = text.split('/');
        let named = parts.next().is_some_and(is_dns_label) && parts.next().is_none_or(is_dns_label);
        (named && parts.next().is_none()).then(|| std::sync::Arc::from(text))
    }
}

impl RequestName {
    /// The request without its subrequest: what the kubelet and a container's
    /// `resources.claims[].request` use.
    pub fn parent(&self) -> &str {
        self.as_str().split_once('/').map_or(self.as_str(), |(parent, _)| parent)
    }

    /// The chosen alternative, where the request is a `firstAvailable` one.
    pub fn subrequest(&self) -> Option<&str> {
        self.as_str().split_once('/').map(|(_, sub)| sub)
    }

    /// Returns true if an entry of a `requests` list (of a config or a constraint) selects this
    /// request: it is the request's name, or the parent's, which selects every subrequest.
    pub fn is_named_by(&self, entry: &str) -> bool {
        self.as_str() == entry || self.parent() == entry
    }

    /// Returns true if one of the entries selects this request.
    pub fn is_named_by_any(&self, entries: &[String]) -> bool {
        entries.iter().any(|entry| self.is_named_by(entry))
    }
}

name_type! {
    /// A group of nodes that a cluster autoscaler extends, in the settings of the controller: a DNS
    /// label. It is part of the names of placeholder pods.
    NodeGroupName, "node group", at most 40,
    "a DNS label: lowercase letters, digits and `-`, beginning and ending with a letter or digit",
    kept_if!(is_dns_label)
}
