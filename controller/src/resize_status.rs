//! Writes of the controller's part of the statuses of GpuResizes. The driver has its own.

use kube::api::Patch;
use kube::{Api, Client, Resource as _};
use serde_json::json;
use tessera_api::resize::GpuResize;

use crate::commit::{REQUEST_TIMEOUT, patch_parameters};
use crate::core::effect::ResizeStatusWrite;
use crate::core::event::Event;
use crate::leadership::Tenure;

/// Writes one status, unless the tenure is over.
pub(crate) async fn write_resize_status(
    client: Client,
    tenure: Tenure,
    write: ResizeStatusWrite,
) -> Event {
    let is_stored = !tenure.is_over() && self::write(&client, &write).await;
    Event::ResizeStatusEnded { resize: write.resize, is_stored }
}

async fn write(client: &Client, write: &ResizeStatusWrite) -> bool {
    let (namespace, name) = (&write.resize.namespace, &write.resize.name);
    let resizes: Api<GpuResize> = Api::namespaced(client.clone(), namespace.as_str());
    let patch = Patch::Apply(json!({
        "apiVersion": GpuResize::api_version(&()), "kind": GpuResize::kind(&()),
        "metadata": {"name": name, "uid": write.resize.uid},
        "status": write.status,
    }));
    let parameters = patch_parameters().force();
    let request = resizes.patch_status(name.as_str(), &parameters, &patch);
    let error = match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(_)) => return true,
        // It is deleted or another one, as its watch will report.
        Ok(Err(kube::Error::Api(answer))) if matches!(answer.code, 404 | 409) => return false,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer".to_owned(),
    };
    tracing::warn!(%namespace, %name, error, "cannot write the status of a GpuResize");
    false
}
