//! Writes of `status.nominatedNodeName`, as JSON patches: their tests are the preconditions. A
//! first nomination tests that the field is empty, and not the pod's `resourceVersion`, because
//! kube-scheduler and the claim controller write the status at the same time. One that replaces or
//! removes another, which is rare, reads the pod first and tests its version.

use k8s_openapi::api::core::v1::Pod;
use kube::api::Patch;
use kube::{Api, Client};
use serde_json::{Value, json};
use tessera_index::{Nomination, Nominator};

use crate::commit::{REQUEST_TIMEOUT, patch_parameters};
use crate::core::effect::NominationWrite;
use crate::core::event::{Event, NominationOutcome};
use crate::leadership::Tenure;

/// Writes one nomination, unless the tenure is over.
pub(crate) async fn write_nomination(
    client: Client,
    tenure: Tenure,
    nomination: NominationWrite,
) -> Event {
    let outcome = if tenure.is_over() {
        NominationOutcome::Failed
    } else {
        write(&client, &nomination).await
    };
    let NominationWrite { pod, node, .. } = nomination;
    Event::NominationEnded { pod: pod.uid, node, outcome }
}

/// The most times that a nomination is read to replace it.
const READS: usize = 3;

async fn write(client: &Client, nomination: &NominationWrite) -> NominationOutcome {
    let (namespace, name) = (&nomination.pod.namespace, &nomination.pod.name);
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace.as_str());
    for _ in 0..READS {
        let request = attempt(&pods, nomination);
        let error = match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
            Ok(Ok(is_stored)) if is_stored => return NominationOutcome::Stored,
            Ok(Ok(_)) => return NominationOutcome::Outdated,
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => {
                return NominationOutcome::Outdated;
            }
            // A test has failed: the pod has changed since it was read.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 409 | 422) => {
                if nomination.replaced.is_none() {
                    return NominationOutcome::Outdated;
                }
                continue;
            }
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                tracing::warn!(
                    %namespace, %name, message = status.message,
                    "may not write status.nominatedNodeName, trying again in 10 minutes"
                );
                return NominationOutcome::Denied;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        tracing::debug!(%namespace, %name, error, "cannot write status.nominatedNodeName");
        return NominationOutcome::Failed;
    }
    NominationOutcome::Failed
}

/// Tries once. Returns false if the nomination is not the one to be replaced.
async fn attempt(pods: &Api<Pod>, nomination: &NominationWrite) -> Result<bool, kube::Error> {
    let name = nomination.pod.name.as_str();
    let mut version = None;
    if let Some(replaced) = &nomination.replaced {
        // kube-scheduler may have set the same node since, which its value does not show.
        let pod = pods.get(name).await?;
        let own = Nomination { node: replaced.clone(), by: Nominator::Controller };
        if Nomination::of(&pod) != Some(own) {
            return Ok(false);
        }
        version = pod.metadata.resource_version;
    }
    let patch = patch(nomination, version.as_deref());
    let patch = serde_json::from_value(patch).expect("invariant: operations of a JSON patch");
    pods.patch_status(name, &patch_parameters(), &Patch::<()>::Json(patch)).await?;
    Ok(true)
}

/// Returns the operations. `version` is that of the pod with the nomination that is replaced. A
/// test for null holds where the field is absent.
fn patch(nomination: &NominationWrite, version: Option<&str>) -> Value {
    const FIELD: &str = "/status/nominatedNodeName";
    let change = match &nomination.node {
        Some(node) => json!({"op": "add", "path": FIELD, "value": node}),
        None => json!({"op": "remove", "path": FIELD}),
    };
    let unchanged = match version {
        Some(version) => {
            json!({"op": "test", "path": "/metadata/resourceVersion", "value": version})
        }
        None => json!({"op": "test", "path": FIELD, "value": null}),
    };
    let same = json!({"op": "test", "path": "/metadata/uid", "value": nomination.pod.uid.as_str()});
    json!([same, unchanged, change])
}
