//! Writes of claim templates. A creation fails if the template exists, and a deletion names the
//! UID, so both can be sent again.

use std::sync::Arc;

use k8s_openapi::api::resource::v1::{ResourceClaimTemplate, ResourceClaimTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};
use tessera_api::names::CONTROLLER_FIELD_MANAGER;

use crate::commit::{REQUEST_TIMEOUT, delete_parameters, post_parameters};
use crate::core::effect::{TemplateChange, TemplateWrite};
use crate::core::event::{Event, TemplateOutcome};
use crate::leadership::Tenure;

/// Label of the templates, for users that list them.
const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", CONTROLLER_FIELD_MANAGER);

/// Writes one claim template, unless the tenure is over.
pub(crate) async fn write_template(client: Client, tenure: Tenure, write: TemplateWrite) -> Event {
    let outcome =
        if tenure.is_over() { TemplateOutcome::Failed } else { self::write(&client, &write).await };
    Event::TemplateEnded { template: write.template, outcome }
}

async fn write(client: &Client, write: &TemplateWrite) -> TemplateOutcome {
    let (namespace, name) = (write.template.namespace.as_str(), write.template.name.as_str());
    let templates: Api<ResourceClaimTemplate> = Api::namespaced(client.clone(), namespace);
    let request = async {
        match &write.change {
            TemplateChange::Create(spec) => {
                let object = object(name, spec);
                templates.create(&post_parameters(), &object).await.map(Arc::new).map(Some)
            }
            TemplateChange::Delete(uid) => {
                templates.delete(name, &delete_parameters(uid)).await.map(|_| None)
            }
        }
    };
    let status = match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(created)) => return created.map_or(TemplateOutcome::Gone, TemplateOutcome::Created),
        Ok(Err(kube::Error::Api(status))) => status,
        Ok(Err(error)) => {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(namespace, name, error, "cannot write a claim template");
            return TemplateOutcome::Failed;
        }
        Err(_) => return TemplateOutcome::Failed,
    };
    match (&write.change, status.code) {
        (TemplateChange::Create(_), 409) => TemplateOutcome::Exists,
        // A deletion whose precondition fails is a conflict: another one has its name now.
        (TemplateChange::Delete(_), 404 | 409) => TemplateOutcome::Gone,
        (_, 500..) => TemplateOutcome::Failed,
        _ => {
            tracing::warn!(namespace, name, message = status.message, "claim template refused");
            TemplateOutcome::Refused { message: status.message.clone() }
        }
    }
}

fn object(name: &str, spec: &ResourceClaimTemplateSpec) -> ResourceClaimTemplate {
    let (label, value) = MANAGED_BY;
    ResourceClaimTemplate {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            labels: Some([(label.to_owned(), value.to_owned())].into()),
            ..ObjectMeta::default()
        },
        spec: Some(spec.clone()),
    }
}
