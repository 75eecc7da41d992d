//! The claims of a pod.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;

/// Returns the names of the claims that a pod names, and of those that were generated for it.
pub(crate) fn claim_names(pod: &Pod) -> BTreeSet<String> {
    let entries = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    let named = entries.filter_map(|entry| entry.resource_claim_name.clone());
    let status = pod.status.iter().flat_map(|s| s.resource_claim_statuses.iter().flatten());
    named.chain(status.filter_map(|status| status.resource_claim_name.clone())).collect()
}
