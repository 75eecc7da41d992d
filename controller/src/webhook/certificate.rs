//! The certificate of the webhook, from its Secret.

use std::sync::{Arc, Mutex, PoisonError};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use prometheus_client::metrics::gauge::Gauge;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tessera_admission::certificates::{CertificateError, Certificates, Validity};
use tessera_api::names::WEBHOOK_SECRET;

/// The certificate that new connections get; none until the Secret has one.
#[derive(Debug, Default)]
pub struct ServedCertificate {
    current: Mutex<Option<(Arc<CertifiedKey>, Validity)>>,
    expiry: Gauge,
}

impl ServedCertificate {
    /// Returns the gauge of the end of its validity, in seconds since the epoch; 0 without one.
    #[must_use]
    pub fn expiry(&self) -> Gauge {
        self.expiry.clone()
    }

    /// Returns `Ok` if clients accept the certificate at this time, in seconds since the epoch.
    ///
    /// # Errors
    /// The reason why they do not.
    pub fn check(&self, now: i64) -> Result<(), String> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        match &*current {
            None => Err(format!("webhook: Secret {WEBHOOK_SECRET} has no certificate yet")),
            Some((_, validity)) if !validity.contains(now) => {
                Err(format!("webhook: the certificate of Secret {WEBHOOK_SECRET} is not valid now"))
            }
            Some(_) => Ok(()),
        }
    }

    /// Takes the certificate of the Secret.
    ///
    /// # Errors
    /// It cannot be read; the one before stays.
    pub fn take(&self, secret: &Secret) -> Result<(), CertificateError> {
        let data = secret.data.clone().unwrap_or_default();
        let certificates = Certificates::from_secret(&data)?;
        let (key, validity) = (Arc::new(certificates.certified_key()?), certificates.validity());
        self.expiry.set(validity.not_after);
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some((key, validity));
        Ok(())
    }
}

impl ResolvesServerCert for ServedCertificate {
    fn resolve(&self, _client_hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().map(|(key, _)| Arc::clone(key))
    }
}

/// Follows the Secret for ever.
pub async fn follow(client: Client, namespace: String, served: Arc<ServedCertificate>) {
    let secrets: Api<Secret> = Api::namespaced(client, &namespace);
    let config = watcher::Config::default().fields(&format!("metadata.name={WEBHOOK_SECRET}"));
    let events = watcher(secrets, config).default_backoff();
    let mut events = std::pin::pin!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::InitApply(secret) | watcher::Event::Apply(secret)) => {
                let is_empty = secret.data.as_ref().is_none_or(|data| data.is_empty());
                match served.take(&secret) {
                    Ok(()) => tracing::info!("serving the webhook's certificate"),
                    // The leader will write one.
                    Err(_) if is_empty => {}
                    Err(error) => {
                        let error = &error as &dyn std::error::Error;
                        tracing::error!(error, "cannot use Secret {WEBHOOK_SECRET}");
                    }
                }
            }
            Ok(watcher::Event::Delete(_)) => {
                tracing::warn!("Secret {WEBHOOK_SECRET} is deleted; its certificate is served on");
            }
            Ok(watcher::Event::Init | watcher::Event::InitDone) => {}
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "watch of Secret {WEBHOOK_SECRET} failed, retrying");
            }
        }
    }
}
