//! Writes of the statuses of GpuQuotas, as a whole: they follow from the claims, and the controller
//! is their only writer.

use kube::api::Patch;
use kube::{Api, Client};
use serde_json::{Value, json};
use tessera_api::quota::GpuQuota;

use crate::commit::{REQUEST_TIMEOUT, patch_parameters};
use crate::core::effect::{QuotaReference, QuotaStatusWrite};
use crate::core::event::{Event, QuotaStatusOutcome};
use crate::leadership::Tenure;

/// Writes one status, unless the tenure is over.
pub(crate) async fn write_quota_status(
    client: Client,
    tenure: Tenure,
    write: QuotaStatusWrite,
) -> Event {
    let QuotaStatusWrite { quota, status } = write;
    let outcome = if tenure.is_over() {
        QuotaStatusOutcome::Failed
    } else {
        self::write(&client, &quota, &json!(status)).await
    };
    Event::QuotaStatusEnded { quota, outcome }
}

async fn write(client: &Client, quota: &QuotaReference, status: &Value) -> QuotaStatusOutcome {
    let quotas: Api<GpuQuota> = Api::namespaced(client.clone(), quota.namespace.as_str());
    let patch = json!([{"op": "add", "path": "/status", "value": status}]);
    let patch = serde_json::from_value(patch).expect("invariant: operations of a JSON patch");
    let (patch, parameters) = (Patch::<()>::Json(patch), patch_parameters());
    let request = quotas.patch_status(quota.name.as_str(), &parameters, &patch);
    let error = match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(_)) => return QuotaStatusOutcome::Stored,
        // It is deleted, as its watch will report.
        Ok(Err(kube::Error::Api(answer))) if answer.code == 404 => {
            return QuotaStatusOutcome::Failed;
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer".to_owned(),
    };
    let QuotaReference { namespace, name } = quota;
    tracing::warn!(%namespace, %name, error, "cannot write the status of a GpuQuota");
    QuotaStatusOutcome::Failed
}
