//! The DRA services, v1 and v1beta1: the same calls, one field apart.

use std::{future::Future, sync::Arc};

use futures::future::join_all;
use tessera_proto::{dra_v1, dra_v1beta1};
use tonic::{Request, Response, Status};

/// A claim as the kubelet names it: text from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedClaim {
    /// Its namespace.
    pub namespace: String,
    /// Its UID.
    pub uid: String,
    /// Its name.
    pub name: String,
}

/// A device of a prepared claim, as the kubelet wants to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedDevice {
    /// Requests that it answers: parents only.
    pub requests: Vec<String>,
    /// Its pool.
    pub pool: String,
    /// Its name there.
    pub device: String,
    /// CDI devices, in the order in which they are applied.
    pub cdi_devices: Vec<String>,
    /// Which share of the device.
    pub share_id: Option<String>,
}

/// Who prepares claims. An error is text for the kubelet, which puts it into an event of the pod.
pub trait Claims: Send + Sync + 'static {
    /// Prepares one claim. Dropping the future must not stop what it began.
    fn prepare(
        &self,
        claim: AskedClaim,
    ) -> impl Future<Output = Result<Vec<PreparedDevice>, String>> + Send;

    /// Undoes it. A claim that is not prepared is no error.
    fn unprepare(&self, claim: AskedClaim) -> impl Future<Output = Result<(), String>> + Send;
}

/// The services on the plugin's socket.
#[derive(Debug)]
pub struct PluginService<C> {
    claims: Arc<C>,
}

impl<C> PluginService<C> {
    /// Hands calls to `claims`.
    #[must_use]
    pub fn new(claims: Arc<C>) -> Self {
        Self { claims }
    }
}

impl<C> Clone for PluginService<C> {
    fn clone(&self) -> Self {
        Self { claims: Arc::clone(&self.claims) }
    }
}

impl<C: Claims> PluginService<C> {
    /// Claims of a call run side by side; each has an answer of its own.
    async fn prepare_all(
        &self,
        asked: Vec<AskedClaim>,
    ) -> Vec<(String, Result<Vec<PreparedDevice>, String>)> {
        join_all(asked.into_iter().map(|claim| async {
            let uid = claim.uid.clone();
            (uid, self.claims.prepare(claim).await)
        }))
        .await
    }

    async fn unprepare_all(&self, asked: Vec<AskedClaim>) -> Vec<(String, Result<(), String>)> {
        join_all(asked.into_iter().map(|claim| async {
            let uid = claim.uid.clone();
            (uid, self.claims.unprepare(claim).await)
        }))
        .await
    }
}

macro_rules! serve {
    ($version:ident, $device:expr) => {
        impl From<$version::Claim> for AskedClaim {
            fn from(claim: $version::Claim) -> Self {
                Self { namespace: claim.namespace, uid: claim.uid, name: claim.name }
            }
        }

        #[tonic::async_trait]
        impl<C: Claims> $version::dra_plugin_server::DraPlugin for PluginService<C> {
            async fn node_prepare_resources(
                &self,
                request: Request<$version::NodePrepareResourcesRequest>,
            ) -> Result<Response<$version::NodePrepareResourcesResponse>, Status> {
                let asked = request.into_inner().claims.into_iter().map(Into::into).collect();
                let answers = self.prepare_all(asked).await.into_iter().map(|(uid, answer)| {
                    let answer = match answer {
                        Ok(devices) => $version::NodePrepareResourceResponse {
                            devices: devices.into_iter().map($device).collect(),
                            error: String::new(),
                        },
                        Err(error) => {
                            $version::NodePrepareResourceResponse { devices: Vec::new(), error }
                        }
                    };
                    (uid, answer)
                });
                Ok(Response::new($version::NodePrepareResourcesResponse {
                    claims: answers.collect(),
                }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$version::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$version::NodeUnprepareResourcesResponse>, Status> {
                let asked = request.into_inner().claims.into_iter().map(Into::into).collect();
                let answers = self.unprepare_all(asked).await.into_iter().map(|(uid, answer)| {
                    let error = answer.err().unwrap_or_default();
                    (uid, $version::NodeUnprepareResourceResponse { error })
                });
                Ok(Response::new($version::NodeUnprepareResourcesResponse {
                    claims: answers.collect(),
                }))
            }
        }
    };
}

serve!(dra_v1, |device: PreparedDevice| dra_v1::Device {
    request_names: device.requests,
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: device.cdi_devices,
    share_id: device.share_id,
});

// v1beta1 knows no shares.
serve!(dra_v1beta1, |device: PreparedDevice| dra_v1beta1::Device {
    request_names: device.requests,
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: device.cdi_devices,
});
