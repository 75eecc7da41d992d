//! The DRA services v1 and v1beta1, which differ in one field.

use std::{future::Future, sync::Arc};

use futures::future::join_all;
use tessera_proto::{dra_v1, dra_v1beta1};
use tonic::{Request, Response, Status};

/// A claim reference from the kubelet, not validated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRef {
    /// The namespace of the claim.
    pub namespace: String,
    /// The UID of the claim.
    pub uid: String,
    /// The name of the claim.
    pub name: String,
}

/// A device of a prepared claim, as sent to the kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedDevice {
    /// The requests for which it was allocated, without subrequests.
    pub requests: Vec<String>,
    /// The pool.
    pub pool: String,
    /// The name in the pool.
    pub device: String,
    /// The CDI devices, in the order in which they are applied.
    pub cdi_devices: Vec<String>,
    /// The share of the device.
    pub share_id: Option<String>,
}

/// Handler of the kubelet's calls. An error is text that the kubelet writes into an event of the
/// pod.
pub trait ClaimHandler: Send + Sync + 'static {
    /// Prepares one claim. Dropping the future must not stop the work that it started.
    fn prepare(
        &self,
        claim: ClaimRef,
    ) -> impl Future<Output = Result<Vec<PreparedDevice>, String>> + Send;

    /// Unprepares one claim. A claim that is not prepared is no error.
    fn unprepare(&self, claim: ClaimRef) -> impl Future<Output = Result<(), String>> + Send;
}

/// The services on the plugin's socket.
#[derive(Debug)]
pub struct PluginService<C> {
    claims: Arc<C>,
}

impl<C> PluginService<C> {
    /// Returns services that forward calls to `claims`.
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

impl<C: ClaimHandler> PluginService<C> {
    /// Prepares the claims of a call concurrently. Each has its own answer.
    async fn prepare_all(
        &self,
        claims: Vec<ClaimRef>,
    ) -> Vec<(String, Result<Vec<PreparedDevice>, String>)> {
        join_all(claims.into_iter().map(|claim| async {
            let uid = claim.uid.clone();
            (uid, self.claims.prepare(claim).await)
        }))
        .await
    }

    async fn unprepare_all(&self, claims: Vec<ClaimRef>) -> Vec<(String, Result<(), String>)> {
        join_all(claims.into_iter().map(|claim| async {
            let uid = claim.uid.clone();
            (uid, self.claims.unprepare(claim).await)
        }))
        .await
    }
}

macro_rules! serve {
    ($version:ident, $device:expr) => {
        impl From<$version::Claim> for ClaimRef {
            fn from(claim: $version::Claim) -> Self {
                Self { namespace: claim.namespace, uid: claim.uid, name: claim.name }
            }
        }

        #[tonic::async_trait]
        impl<C: ClaimHandler> $version::dra_plugin_server::DraPlugin for PluginService<C> {
            async fn node_prepare_resources(
                &self,
                request: Request<$version::NodePrepareResourcesRequest>,
            ) -> Result<Response<$version::NodePrepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(Into::into).collect();
                let answers = self.prepare_all(claims).await.into_iter().map(|(uid, answer)| {
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
                let claims = request.into_inner().claims.into_iter().map(Into::into).collect();
                let answers = self.unprepare_all(claims).await.into_iter().map(|(uid, answer)| {
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

// v1beta1 has no field for shares.
serve!(dra_v1beta1, |device: PreparedDevice| dra_v1beta1::Device {
    request_names: device.requests,
    pool_name: device.pool,
    device_name: device.device,
    cdi_device_ids: device.cdi_devices,
});
