//! Report on a failed trial: the pods of its namespace that neither run nor have succeeded.

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::json;

use super::test_bed::phase;
use crate::wait::Watched;

/// Maximum number of pods that are described.
const MAX_PODS: usize = 3;

/// Maximum number of warnings about other objects.
const MAX_WARNINGS: usize = 10;

/// Returns the number of pods, and status, claims and events of the first ones that neither run
/// nor have succeeded, or are being deleted. An object that cannot be listed is left out: a report
/// must not hide the error that it is about.
pub(super) async fn report(client: &Client, namespace: &str) -> String {
    let state = State {
        pods: list(client, namespace).await,
        claims: list(client, namespace).await,
        events: list(client, namespace).await,
    };
    state.report()
}

async fn list<K>(client: &Client, namespace: &str) -> Vec<K>
where
    K: Watched + Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    api.list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default()
}

struct State {
    pods: Vec<Pod>,
    claims: Vec<ResourceClaim>,
    events: Vec<Event>,
}

impl State {
    fn report(&self) -> String {
        let unfinished: Vec<&Pod> = self.pods.iter().filter(|pod| is_unfinished(pod)).collect();
        let mut lines =
            vec![format!("{} of {} pods are not done", unfinished.len(), self.pods.len())];
        for pod in unfinished.iter().take(MAX_PODS) {
            self.describe(pod, &mut lines);
        }
        lines.push("warnings about other objects:".into());
        let is_pod = |event: &&Event| event.involved_object.kind.as_deref() == Some("Pod");
        let others = self.events.iter().filter(|event| !is_pod(event));
        let warnings = others.filter(|event| event.type_.as_deref() == Some("Warning"));
        lines.extend(warnings.rev().take(MAX_WARNINGS).map(line_of));
        lines.join("\n")
    }

    fn describe(&self, pod: &Pod, lines: &mut Vec<String>) {
        let name = pod.name_any();
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or("none");
        let deleted = pod.metadata.deletion_timestamp.as_ref().map(|time| time.0);
        let (created, status) = (created_at(pod), json!(pod.status));
        lines.push(format!(
            "pod {name}, node {node}, created {created:?}, deleted {deleted:?}: {status}"
        ));
        let owned = |claim: &&ResourceClaim| {
            claim.owner_references().iter().any(|owner| Some(&owner.uid) == pod.uid().as_ref())
        };
        for claim in self.claims.iter().filter(owned) {
            let (at, status) = (created_at(claim), json!(claim.status));
            lines.push(format!("  claim {}, created {at:?}: {status}", claim.name_any()));
        }
        let about = |event: &&Event| event.involved_object.name.as_deref() == Some(name.as_str());
        lines.extend(self.events.iter().filter(about).map(line_of));
    }
}

fn is_unfinished(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some() || !matches!(phase(pod), "Running" | "Succeeded")
}

fn created_at(object: &impl ResourceExt) -> Option<Timestamp> {
    object.creation_timestamp().map(|time| time.0)
}

fn line_of(event: &Event) -> String {
    let at = event.last_timestamp.as_ref().map(|time| time.0);
    let at = at.or(event.event_time.as_ref().map(|time| time.0));
    let source = event.source.as_ref().and_then(|source| source.host.as_deref());
    format!(
        "  {} {} {} from {}: {}",
        at.map_or_else(String::new, |at| at.to_string()),
        event.involved_object.name.as_deref().unwrap_or_default(),
        event.reason.as_deref().unwrap_or_default(),
        source.or(event.reporting_component.as_deref()).unwrap_or_default(),
        event.message.as_deref().unwrap_or_default()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects<K: serde::de::DeserializeOwned>(values: serde_json::Value) -> Vec<K> {
        serde_json::from_value(values).unwrap()
    }

    #[test]
    fn report_names_only_pods_that_are_not_done() {
        let pod = |name: &str, phase: &str| json!({"metadata": {"name": name, "uid": name}, "status": {"phase": phase}});
        let mut deleted = pod("deleted", "Running");
        deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "waits", "uid": "waits"});
        let event = |kind: &str, name: &str, message: &str| {
            json!({
                "metadata": {}, "type": "Warning", "message": message,
                "involvedObject": {"kind": kind, "name": name},
            })
        };
        let state = State {
            pods: objects(json!([
                pod("runs", "Running"),
                pod("waits", "Pending"),
                deleted,
                pod("ended", "Succeeded")
            ])),
            claims: objects(
                json!([{"metadata": {"name": "of-waits", "ownerReferences": [owner]}, "spec": {}}]),
            ),
            events: objects(json!([
                event("Pod", "waits", "no GPU is free"),
                event("Pod", "runs", "was slow"),
                event("ReplicaSet", "set", "quota exceeded"),
            ])),
        };
        let report = state.report();
        assert!(report.starts_with("2 of 4 pods are not done\n"), "{report}");
        for part in ["pod waits", "pod deleted", "claim of-waits", "no GPU", "quota exceeded"] {
            assert!(report.contains(part), "{part}: {report}");
        }
        assert!(!report.contains("was slow") && !report.contains("pod ended"), "{report}");
    }
}
