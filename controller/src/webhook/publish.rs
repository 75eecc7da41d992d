//! The objects of the webhook: written by the leader, and only by it.
//!
//! A round reads the three objects and corrects what differs, so a change by another client lasts
//! 30 s at most. The order is that of a rotation: an authority is trusted before its
//! certificate is served ([`tessera_admission::certificates`]).

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::{MutatingWebhook, MutatingWebhookConfiguration};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tessera_admission::certificates::{CertificateError, Certificates};
use tessera_admission::configuration::WebhookService;
use tessera_api::names::{
    CONTROLLER_FIELD_MANAGER, GUARD_CONFIG_MAP, WEBHOOK_CONFIGURATION, WEBHOOK_SECRET,
    WEBHOOK_SERVICE,
};
use tessera_dialect::Converter;

use super::certificate::ServedCertificate;
use crate::commit::{REQUEST_TIMEOUT, patch_parameters};
use crate::leadership::Tenure;

/// Time between two rounds.
const INTERVAL: Duration = Duration::from_secs(30);

/// Time to the next round while something is missing: at the start, and after an error.
const SHORT_INTERVAL: Duration = Duration::from_secs(2);

/// Writer of the certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum CertificateSource {
    /// The controller makes and renews it.
    SelfManaged,
    /// Another program writes the Secret and the caBundle, for example cert-manager.
    External,
}

/// Errors of a round.
#[derive(Debug, thiserror::Error)]
pub enum WebhookPublishError {
    /// A request failed.
    #[error("cannot {action} {object}")]
    Request {
        /// `read` or `write`.
        action: &'static str,
        /// Kind and name.
        object: String,
        /// The cause.
        #[source]
        source: Box<kube::Error>,
    },
    /// The API server does not answer.
    #[error("cannot {action} {object}: no answer within {REQUEST_TIMEOUT:?}")]
    NoAnswer {
        /// `read` or `write`.
        action: &'static str,
        /// Kind and name.
        object: String,
    },
    /// A certificate cannot be made.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

/// Writes the objects of the webhook.
pub struct WebhookPublisher {
    secrets: Api<Secret>,
    config_maps: Api<ConfigMap>,
    configurations: Api<MutatingWebhookConfiguration>,
    service: WebhookService,
    converter: Arc<Converter>,
    served: Arc<ServedCertificate>,
    source: CertificateSource,
    tenure: Tenure,
    clock: Box<dyn Fn() -> i64 + Send + Sync>,
}

impl WebhookPublisher {
    /// Returns a publisher for the objects in `namespace`. `served` is the certificate of this
    /// process: kube-apiserver is told of the webhook once one replica has one. `clock` returns
    /// seconds since the epoch.
    pub fn new(
        client: Client,
        namespace: &str,
        converter: Arc<Converter>,
        served: Arc<ServedCertificate>,
        source: CertificateSource,
        clock: impl Fn() -> i64 + Send + Sync + 'static,
    ) -> Self {
        let service =
            WebhookService { namespace: namespace.to_owned(), name: WEBHOOK_SERVICE.to_owned() };
        Self {
            secrets: Api::namespaced(client.clone(), namespace),
            config_maps: Api::namespaced(client.clone(), namespace),
            configurations: Api::all(client),
            service,
            converter,
            served,
            source,
            tenure: Tenure::endless(),
            clock: Box::new(clock),
        }
    }

    /// Returns the publisher with writes restricted to `tenure`.
    #[must_use]
    pub fn during(self, tenure: Tenure) -> Self {
        Self { tenure, ..self }
    }

    /// Returns the certificate of this process.
    #[must_use]
    pub fn served(&self) -> Arc<ServedCertificate> {
        Arc::clone(&self.served)
    }

    /// Publishes for ever.
    pub async fn run(self) {
        loop {
            let pause = match self.round().await {
                Ok(true) => INTERVAL,
                Ok(false) => SHORT_INTERVAL,
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(error, "cannot publish the admission webhook, retrying");
                    SHORT_INTERVAL
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Corrects what differs. Returns false if the webhook is not published, because this process
    /// has no certificate yet.
    ///
    /// # Errors
    /// [`WebhookPublishError`]; the next round tries again.
    pub async fn round(&self) -> Result<bool, WebhookPublishError> {
        let configuration = named("MutatingWebhookConfiguration", WEBHOOK_CONFIGURATION);
        let live = self.configurations.get(WEBHOOK_CONFIGURATION);
        let live = answered("read", &configuration, live).await?.webhooks.unwrap_or_default();
        let ca_bundle = match self.source {
            CertificateSource::SelfManaged => self.renew(trusted(&live)).await?,
            CertificateSource::External => None,
        };
        if self.served.check((self.clock)()).is_err() {
            return Ok(false);
        }
        let wanted = self.service.webhooks(&self.converter, ca_bundle.as_deref());
        if !are_equal(&live, &wanted) && !self.tenure.is_over() {
            let object = json!({
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "MutatingWebhookConfiguration",
                "metadata": {"name": WEBHOOK_CONFIGURATION},
                "webhooks": wanted,
            });
            let (parameters, patch) = (apply(), Patch::Apply(&object));
            let request = self.configurations.patch(WEBHOOK_CONFIGURATION, &parameters, &patch);
            answered("write", &configuration, request).await?;
            tracing::info!(entries = wanted.len(), "published the admission webhook");
        }
        // Afterwards: it refuses pods that the webhook has not converted.
        self.publish_guard().await?;
        Ok(true)
    }

    /// Renews the certificates in the Secret if that is due. Returns the authorities to trust;
    /// `None` if there are none and this process may not write any more.
    async fn renew(
        &self,
        published: Option<String>,
    ) -> Result<Option<String>, WebhookPublishError> {
        let object = named("Secret", WEBHOOK_SECRET);
        let secret = answered("read", &object, self.secrets.get(WEBHOOK_SECRET)).await?;
        let data = secret.data.unwrap_or_default();
        let current = Certificates::from_secret(&data);
        if let Err(error) = &current
            && !data.is_empty()
        {
            let error = error as &dyn std::error::Error;
            tracing::error!(error, "replacing the content of Secret {WEBHOOK_SECRET}");
        }
        let (current, name) = (current.ok(), self.service.dns_name());
        let renewed =
            Certificates::renewed(current.as_ref(), &name, published.as_deref(), (self.clock)())?;
        let Some(renewed) = renewed.filter(|_| !self.tenure.is_over()) else {
            return Ok(current.map(|current| current.ca_bundle()));
        };
        let mut entries: serde_json::Map<String, Value> =
            data.keys().map(|key| (key.clone(), Value::Null)).collect();
        entries.extend(renewed.to_secret().into_iter().map(|(key, value)| (key, json!(value))));
        // The certificates of another leader must not be lost.
        let version = secret.metadata.resource_version;
        let patch = json!({"metadata": {"resourceVersion": version}, "data": entries});
        let (parameters, patch) = (patch_parameters(), Patch::Merge(&patch));
        let request = self.secrets.patch(WEBHOOK_SECRET, &parameters, &patch);
        answered("write", &object, request).await?;
        tracing::info!("renewed the certificates of the admission webhook");
        Ok(Some(renewed.ca_bundle()))
    }

    /// Writes the data of the guard, if it differs.
    async fn publish_guard(&self) -> Result<(), WebhookPublishError> {
        let object = named("ConfigMap", GUARD_CONFIG_MAP);
        let live = answered("read", &object, self.config_maps.get(GUARD_CONFIG_MAP)).await?;
        let wanted = self.converter.guard_data();
        if live.data.as_ref() == Some(&wanted) || self.tenure.is_over() {
            return Ok(());
        }
        let patch = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": GUARD_CONFIG_MAP},
            "data": wanted,
        });
        let (parameters, patch) = (apply(), Patch::Apply(&patch));
        let request = self.config_maps.patch(GUARD_CONFIG_MAP, &parameters, &patch);
        answered("write", &object, request).await.map(drop)
    }
}

fn apply() -> PatchParams {
    PatchParams::apply(CONTROLLER_FIELD_MANAGER).force()
}

fn named(kind: &str, name: &str) -> String {
    format!("{kind} {name}")
}

/// Returns the caBundle of all entries; `None` if they have several, or none.
fn trusted(entries: &[MutatingWebhook]) -> Option<String> {
    let bundles = entries.iter().map(|entry| entry.client_config.ca_bundle.as_ref());
    let mut bundles: Vec<_> = bundles.collect();
    bundles.dedup();
    match bundles[..] {
        [Some(bundle)] => String::from_utf8(bundle.0.clone()).ok(),
        _ => None,
    }
}

/// Returns true if the entries are as wanted. A caBundle that is not wanted is another writer's.
fn are_equal(live: &[MutatingWebhook], wanted: &[MutatingWebhook]) -> bool {
    let is_equal = |(live, wanted): (&MutatingWebhook, &MutatingWebhook)| {
        let mut live = live.clone();
        if wanted.client_config.ca_bundle.is_none() {
            live.client_config.ca_bundle = None;
        }
        live == *wanted
    };
    live.len() == wanted.len() && live.iter().zip(wanted).all(is_equal)
}

async fn answered<T>(
    action: &'static str,
    object: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, WebhookPublishError> {
    let object = object.to_owned();
    match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(source)) => {
            Err(WebhookPublishError::Request { action, object, source: Box::new(source) })
        }
        Err(_) => Err(WebhookPublishError::NoAnswer { action, object }),
    }
}
