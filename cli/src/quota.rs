//! `kubectl tessera quota`: what the claims of namespaces hold of their GpuQuotas.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use tessera_allocator::RefusalCause;
use tessera_api::names::{Namespace, QuotaName};
use tessera_api::quantity::Quantity;
use tessera_index::QuotaStanding;

use crate::explain::PlanView;
use crate::output::{Table, count};

/// The quotas of one namespace, or of all.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct QuotaReport {
    /// The namespace; none for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The quotas, by namespace and name.
    pub quotas: Vec<QuotaView>,
}

/// One quota.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct QuotaView {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The DeviceClasses whose devices count; empty = all.
    pub device_class_names: Vec<String>,
    /// The resources that it limits.
    pub resources: Vec<QuotaResourceView>,
    /// Pods that wait for the quota, by name.
    pub waiting_pods: Vec<String>,
}

/// One resource of a quota.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct QuotaResourceView {
    /// The resource.
    pub resource: &'static str,
    /// The amount that allocated claims hold.
    pub used: Quantity,
    /// The limit.
    pub hard: Quantity,
}

impl QuotaReport {
    /// Reads the quotas of a namespace, or of all.
    pub fn new(view: &PlanView<'_>, namespace: Option<&Namespace>) -> Self {
        let waiting = waiting_pods(view);
        let selected = |quota: &QuotaStanding<'_>| namespace.is_none_or(|n| n == quota.namespace);
        let quotas = view.index.quotas().filter(selected).map(|quota| {
            let key = (quota.namespace.clone(), quota.state.quota.name.clone());
            let waiting = waiting.get(&key).into_iter().flatten().cloned().collect();
            quota_view(&quota, waiting)
        });
        Self { namespace: namespace.map(ToString::to_string), quotas: quotas.collect() }
    }
}

fn quota_view(standing: &QuotaStanding<'_>, waiting_pods: Vec<String>) -> QuotaView {
    let (quota, used) = (&standing.state.quota, &standing.state.used);
    let resources = quota.hard.iter().map(|(resource, hard)| QuotaResourceView {
        resource: resource.name(),
        used: used.get(resource).copied().unwrap_or_default(),
        hard: *hard,
    });
    QuotaView {
        namespace: standing.namespace.to_string(),
        name: quota.name.to_string(),
        device_class_names: quota.classes.iter().map(ToString::to_string).collect(),
        resources: resources.collect(),
        waiting_pods,
    }
}

/// Returns the names of the pods that the plan refuses because of each quota.
fn waiting_pods(view: &PlanView<'_>) -> BTreeMap<(Namespace, QuotaName), BTreeSet<String>> {
    let mut waiting: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
    for refusal in &view.plan.refusals {
        let RefusalCause::OverQuota(shortfall) = &*refusal.cause else { continue };
        let Some((namespace, name)) = view.index.pod_name(&refusal.pod) else { continue };
        let key = (namespace.clone(), shortfall.quota.clone());
        waiting.entry(key).or_default().insert(name.to_string());
    }
    waiting
}

/// Returns the report as a table.
pub fn text(report: &QuotaReport, headers: bool) -> String {
    if report.quotas.is_empty() {
        return match &report.namespace {
            Some(namespace) => format!(
                "namespace {namespace} has no GpuQuota (all namespaces: kubectl tessera quota -A)\n"
            ),
            None => "no namespace has a GpuQuota\n".to_owned(),
        };
    }
    let names = ["NAMESPACE", "QUOTA", "CLASSES", "RESOURCE", "USED", "HARD", "WAITING"];
    let mut table = Table::new(headers.then_some(&names[..])).align_right(&[4, 5]);
    for quota in &report.quotas {
        for (at, resource) in quota.resources.iter().enumerate() {
            // What the rows of a quota share is in the first one.
            let once = |text: String| if at == 0 { text } else { String::new() };
            let classes = match quota.device_class_names.as_slice() {
                [] => "all".to_owned(),
                names => names.join(","),
            };
            let waiting = match quota.waiting_pods.len() {
                0 => String::new(),
                pods => count(pods, "pod"),
            };
            table.row(vec![
                once(quota.namespace.clone()),
                once(quota.name.clone()),
                once(classes),
                resource.resource.to_owned(),
                resource.used.to_string(),
                resource.hard.to_string(),
                once(waiting),
            ]);
        }
    }
    table.render()
}
