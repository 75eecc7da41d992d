//! The objects of the webhook: written by the leader, and only by it.
//!
//! A round reads the objects and corrects what differs, so a change by another client lasts
//! 30 s at most. The order is that of a rotation: an authority is trusted before its
//! certificate is served ([`tessera_admission::certificates`]).

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhook, MutatingWebhookConfiguration, ValidatingWebhook,
    ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tessera_admission::certificates::{CertificateError, Certificates};
use tessera_admission::configuration::WebhookService;
use tessera_api::names::{
    CONTROLLER_FIELD_MANAGER, GUARD_CONFIG_MAP, VALIDATING_CONFIGURATION, WEBHOOK_CONFIGURATION,
    WEBHOOK_SECRET, WEBHOOK_SERVICE,
};
use tessera_dialect::Converter;

use super::certificate::ServedCertificate;
use crate::commit::{REQUEST_TIMEOUT, patch_parameters};
use crate::leadership::Tenure;

/// Time between two rounds.
const INTERVAL: Duration = Duration::from_secs(30);

/// Time to the next round while there is no certificate. Each error doubles it, up to [`INTERVAL`].
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
    mutating: Api<MutatingWebhookConfiguration>,
    validating: Api<ValidatingWebhookConfiguration>,
    service: WebhookService,
    converter: Option<Arc<Converter>>,
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
        converter: Option<Arc<Converter>>,
        served: Arc<ServedCertificate>,
        source: CertificateSource,
        clock: impl Fn() -> i64 + Send + Sync + 'static,
    ) -> Self {
        let service =
            WebhookService { namespace: namespace.to_owned(), name: WEBHOOK_SERVICE.to_owned() };
        Self {
            secrets: Api::namespaced(client.clone(), namespace),
            config_maps: Api::namespaced(client.clone(), namespace),
            mutating: Api::all(client.clone()),
            validating: Api::all(client),
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
        let mut after_failure = SHORT_INTERVAL;
        loop {
            let pause = match self.round().await {
                Ok(is_published) => {
                    after_failure = SHORT_INTERVAL;
                    if is_published { INTERVAL } else { SHORT_INTERVAL }
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::error!(error, "cannot publish the admission webhook, retrying");
                    after_failure = (after_failure * 2).min(INTERVAL);
                    after_failure
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
        let (mutating, validating) =
            (self.mutating_entries().await?, self.validating_entry().await?);
        let bundles = mutating.iter().map(|entry| &entry.client_config);
        let bundles = bundles.chain(validating.iter().map(|entry| &entry.client_config));
        let ca_bundle = match self.source {
            CertificateSource::SelfManaged => self.renew(trusted(bundles)).await?,
            CertificateSource::External => None,
        };
        if self.served.check((self.clock)()).is_err() {
            return Ok(false);
        }
        let wanted = vec![self.service.validating_webhook(ca_bundle.as_deref())];
        if !are_equal(&validating, &wanted) {
            self.write(&self.validating, VALIDATING_CONFIGURATION, &wanted).await?;
        }
        let Some(converter) = &self.converter else { return Ok(true) };
        let wanted = self.service.webhooks(converter, ca_bundle.as_deref());
        if !are_equal(&mutating, &wanted) {
            self.write(&self.mutating, WEBHOOK_CONFIGURATION, &wanted).await?;
        }
        // Afterwards: it refuses pods that the webhook has not converted.
        self.publish_guard(converter).await?;
        Ok(true)
    }

    async fn mutating_entries(&self) -> Result<Vec<MutatingWebhook>, WebhookPublishError> {
        if self.converter.is_none() {
            return Ok(Vec::new());
        }
        let object = named("MutatingWebhookConfiguration", WEBHOOK_CONFIGURATION);
        let live = answered("read", &object, self.mutating.get(WEBHOOK_CONFIGURATION)).await?;
        Ok(live.webhooks.unwrap_or_default())
    }

    async fn validating_entry(&self) -> Result<Vec<ValidatingWebhook>, WebhookPublishError> {
        let object = named("ValidatingWebhookConfiguration", VALIDATING_CONFIGURATION);
        let live = answered("read", &object, self.validating.get(VALIDATING_CONFIGURATION)).await?;
        Ok(live.webhooks.unwrap_or_default())
    }

    /// Writes the entries of a configuration.
    async fn write<K>(
        &self,
        api: &Api<K>,
        name: &str,
        entries: &[impl Serialize],
    ) -> Result<(), WebhookPublishError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        if self.tenure.is_over() {
            return Ok(());
        }
        let (kind, version) = (K::kind(&()), K::api_version(&()));
        let object = json!({
            "apiVersion": version, "kind": kind, "metadata": {"name": name}, "webhooks": entries,
        });
        let (parameters, patch) = (apply(), Patch::Apply(&object));
        answered("write", &named(&kind, name), api.patch(name, &parameters, &patch)).await?;
        tracing::info!(%kind, name, entries = entries.len(), "published the admission webhook");
        Ok(())
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
    async fn publish_guard(&self, converter: &Converter) -> Result<(), WebhookPublishError> {
        let object = named("ConfigMap", GUARD_CONFIG_MAP);
        let live = answered("read", &object, self.config_maps.get(GUARD_CONFIG_MAP)).await?;
        let wanted = converter.guard_data();
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
fn trusted<'c>(entries: impl Iterator<Item = &'c WebhookClientConfig>) -> Option<String> {
    let mut bundles: Vec<_> = entries.map(|entry| entry.ca_bundle.as_ref()).collect();
    bundles.dedup();
    match bundles[..] {
        [Some(bundle)] => String::from_utf8(bundle.0.clone()).ok(),
        _ => None,
    }
}

/// An entry of a webhook configuration.
trait Entry: Clone + PartialEq {
    fn client(&mut self) -> &mut WebhookClientConfig;
}

impl Entry for MutatingWebhook {
    fn client(&mut self) -> &mut WebhookClientConfig {
        &mut self.client_config
    }
}

impl Entry for ValidatingWebhook {
    fn client(&mut self) -> &mut WebhookClientConfig {
        &mut self.client_config
    }
}

/// Returns true if the entries are as wanted. A caBundle that is not wanted is another writer's.
fn are_equal<E: Entry>(live: &[E], wanted: &[E]) -> bool {
    let is_equal = |(live, wanted): (&E, &E)| {
        let (mut live, mut wanted) = (live.clone(), wanted.clone());
        if wanted.client().ca_bundle.is_none() {
            live.client().ca_bundle = None;
        }
        live == wanted
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
