//! Writes of placeholder pods. A creation fails if the pod exists, and a deletion names the UID, so
//! both can be sent again.
//!
//! The PriorityClass of the pods owns them: once it is deleted with the last group of nodes, or
//! with the chart, kube-controller-manager deletes the pods.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Api, Client, Resource as _};

use crate::commit::{REQUEST_TIMEOUT, delete_parameters, post_parameters};
use crate::core::effect::{PlaceholderChange, PlaceholderWrite};
use crate::core::event::Event;
use crate::leadership::Tenure;

/// Writes one placeholder pod, unless the tenure is over.
pub async fn write_placeholder(client: Client, tenure: Tenure, write: PlaceholderWrite) -> Event {
    let is_done = !tenure.is_over() && self::write(&client, &write).await;
    Event::PlaceholderEnded { pod: write.pod, is_done }
}

async fn write(client: &Client, write: &PlaceholderWrite) -> bool {
    let PlaceholderWrite { namespace, pod, change } = write;
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace.as_str());
    let request = async {
        match change {
            PlaceholderChange::Create(object) => create(client, &pods, object).await,
            PlaceholderChange::Delete(uid) => {
                pods.delete(pod.as_str(), &delete_parameters(uid)).await.map(drop)
            }
        }
    };
    let error = match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(())) => return true,
        // A creation of one that exists, or a deletion of one that is gone or another by now.
        Ok(Err(kube::Error::Api(status))) if is_as_wanted(change, status.code) => return true,
        Ok(Err(kube::Error::Api(status))) => status.message,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer".to_owned(),
    };
    let is_creation = matches!(change, PlaceholderChange::Create(_));
    tracing::warn!(%namespace, %pod, is_creation, error, "cannot write a placeholder pod");
    false
}

fn is_as_wanted(change: &PlaceholderChange, code: u16) -> bool {
    match change {
        PlaceholderChange::Create(_) => code == 409,
        PlaceholderChange::Delete(_) => matches!(code, 404 | 409),
    }
}

async fn create(client: &Client, pods: &Api<Pod>, object: &Pod) -> Result<(), kube::Error> {
    let mut object = object.clone();
    let class = object.spec.as_ref().and_then(|spec| spec.priority_class_name.as_deref());
    let classes: Api<PriorityClass> = Api::all(client.clone());
    let class = classes.get(class.unwrap_or_default()).await?;
    object.metadata.owner_references = Some(vec![OwnerReference {
        api_version: PriorityClass::api_version(&()).into_owned(),
        kind: PriorityClass::kind(&()).into_owned(),
        name: class.metadata.name.unwrap_or_default(),
        uid: class.metadata.uid.unwrap_or_default(),
        ..OwnerReference::default()
    }]);
    pods.create(&post_parameters(), &object).await.map(drop)
}
