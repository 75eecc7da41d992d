//! Registration with the kubelet, which finds the socket, asks for the plugin, and sends the
//! result.

use std::path::PathBuf;

use tessera_proto::{
    PLUGIN_TYPE, SUPPORTS_DRA_V1, SUPPORTS_DRA_V1BETA1, SUPPORTS_HEALTH_V1,
    SUPPORTS_HEALTH_V1ALPHA1,
    registration::{
        InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
        registration_server::Registration,
    },
};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

/// State of the registration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RegistrationState {
    /// The kubelet has not reported a result yet.
    #[default]
    Pending,
    /// The driver is registered.
    Registered,
    /// The kubelet refused, with this message. It tries again.
    Refused(String),
}

/// The registration service.
#[derive(Debug)]
pub struct RegistrationService {
    driver: String,
    endpoint: PathBuf,
    registered: watch::Sender<RegistrationState>,
}

impl RegistrationService {
    /// Returns a service that registers `driver`, whose services are at `endpoint`, and sends the
    /// result to `registered`.
    #[must_use]
    pub fn new(
        driver: impl Into<String>,
        endpoint: PathBuf,
        registered: watch::Sender<RegistrationState>,
    ) -> Self {
        Self { driver: driver.into(), endpoint, registered }
    }
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: PLUGIN_TYPE.to_owned(),
            name: self.driver.clone(),
            endpoint: self.endpoint.display().to_string(),
            supported_versions: [
                SUPPORTS_DRA_V1,
                SUPPORTS_DRA_V1BETA1,
                SUPPORTS_HEALTH_V1,
                SUPPORTS_HEALTH_V1ALPHA1,
            ]
            .map(str::to_owned)
            .to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            tracing::info!(endpoint = %self.endpoint.display(), "registered with the kubelet");
            self.registered.send_replace(RegistrationState::Registered);
        } else {
            tracing::error!(
                error = status.error,
                "kubelet refused the registration; it will try again"
            );
            self.registered.send_replace(RegistrationState::Refused(status.error));
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
