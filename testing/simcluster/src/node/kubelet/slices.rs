//! Wiping of the node's ResourceSlices, as the kubelet does at start and after a driver
//! disconnects.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client};
use tokio::task::AbortHandle;

/// Pause after a failed deletion.
const RETRY: Duration = Duration::from_secs(1);

/// Deletes ResourceSlices of one node.
#[derive(Clone, Debug)]
pub(crate) struct SliceWiper {
    api: Api<ResourceSlice>,
    node: String,
    delay: Duration,
    pending: Arc<Mutex<HashMap<String, AbortHandle>>>,
}

impl SliceWiper {
    /// Creates a wiper. `delay` is the time between a disconnect and the deletion.
    pub(crate) fn new(client: Client, node: String, delay: Duration) -> Self {
        Self { api: Api::all(client), node, delay, pending: Arc::default() }
    }

    /// Deletes the node's slices of all drivers.
    pub(crate) async fn wipe_all(&self) {
        self.wipe(&format!("spec.nodeName={}", self.node)).await;
    }

    /// Schedules the deletion of the driver's slices. An earlier schedule stays in effect.
    pub(crate) fn schedule(&self, driver: &str) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.get(driver).is_some_and(|task| !task.is_finished()) {
            return;
        }
        let (wiper, selector) =
            (self.clone(), format!("spec.nodeName={},spec.driver={driver}", self.node));
        let task = tokio::spawn(async move {
            tokio::time::sleep(wiper.delay).await;
            wiper.wipe(&selector).await;
        });
        pending.insert(driver.to_owned(), task.abort_handle());
    }

    /// Cancels the deletion for a reconnected driver.
    pub(crate) fn cancel(&self, driver: &str) {
        if let Some(task) =
            self.pending.lock().unwrap_or_else(PoisonError::into_inner).remove(driver)
        {
            task.abort();
        }
    }

    /// Cancels all scheduled deletions.
    pub(crate) fn cancel_all(&self) {
        let tasks =
            std::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner));
        tasks.into_values().for_each(|task| task.abort());
    }

    async fn wipe(&self, selector: &str) {
        let slices = ListParams::default().fields(selector);
        while let Err(error) = self.api.delete_collection(&DeleteParams::default(), &slices).await {
            tracing::warn!(%error, selector, "cannot delete ResourceSlices; retrying");
            tokio::time::sleep(RETRY).await;
        }
    }
}
