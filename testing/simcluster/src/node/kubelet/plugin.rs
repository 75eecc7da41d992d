//! One registered driver instance, with its connection and its calls.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tessera_proto::dra_v1::dra_plugin_client::DraPluginClient;
use tessera_proto::dra_v1::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest,
    NodePrepareResourcesResponse, NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use tessera_proto::dra_v1beta1::{self, dra_plugin_client::DraPluginClient as DraPluginBetaClient};
use tessera_proto::{
    SUPPORTS_DRA_V1, SUPPORTS_DRA_V1BETA1, SUPPORTS_HEALTH_V1, SUPPORTS_HEALTH_V1ALPHA1,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tonic::codegen::http;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Request, Status};

/// The kubelet's time limit for a call to a driver.
const CALL_TIMEOUT: Duration = Duration::from_secs(45);

/// DRA service version used with a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DraService {
    V1,
    V1Beta1,
}

/// Health service version used with a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HealthService {
    V1,
    V1Alpha1,
}

impl DraService {
    /// Returns the first version in the driver's order that the kubelet supports.
    pub(crate) fn choose(supported: &[String]) -> Result<Self, String> {
        supported
            .iter()
            .find_map(|service| match service.as_str() {
                SUPPORTS_DRA_V1 => Some(Self::V1),
                SUPPORTS_DRA_V1BETA1 => Some(Self::V1Beta1),
                _ => None,
            })
            .ok_or_else(|| format!("none of services supported by the plugin ({supported:?}) are supported by the kubelet ([{SUPPORTS_DRA_V1:?} {SUPPORTS_DRA_V1BETA1:?}])"))
    }
}

impl HealthService {
    /// Returns the newest version that both support. Health is optional.
    pub(crate) fn choose(supported: &[String]) -> Option<Self> {
        let offers = |name: &str| supported.iter().any(|service| service == name);
        if offers(SUPPORTS_HEALTH_V1) {
            Some(Self::V1)
        } else if offers(SUPPORTS_HEALTH_V1ALPHA1) {
            Some(Self::V1Alpha1)
        } else {
            None
        }
    }
}

/// A registered driver instance.
#[derive(Debug)]
pub(crate) struct Plugin {
    pub(crate) driver: String,
    pub(crate) endpoint: PathBuf,
    pub(crate) service: DraService,
    pub(crate) health: Option<HealthService>,
    pub(crate) channel: Channel,
    connections: watch::Sender<usize>,
}

impl Plugin {
    /// Connects to the driver's endpoint. Later calls reconnect if needed.
    pub(crate) async fn connect(
        driver: String,
        endpoint: PathBuf,
        service: DraService,
        health: Option<HealthService>,
    ) -> Result<Self, ChannelError> {
        let connections = watch::channel(0).0;
        let channel = channel(&endpoint, Authority::Localhost, Some(connections.clone())).await?;
        Ok(Self { driver, endpoint, service, health, channel, connections })
    }

    pub(crate) fn is_connected(&self) -> bool {
        *self.connections.borrow() > 0
    }

    /// Resolves when the last connection has closed.
    pub(crate) async fn disconnected(&self) {
        // This cannot fail, since `self` owns the sender.
        let _ = self.connections.subscribe().wait_for(|open| *open == 0).await;
    }

    /// Calls `NodePrepareResources` in the driver's version; the result is always v1.
    pub(crate) async fn prepare(
        &self,
        claims: Vec<Claim>,
    ) -> Result<HashMap<String, NodePrepareResourceResponse>, Status> {
        let call = async {
            match self.service {
                DraService::V1 => DraPluginClient::new(self.channel.clone())
                    .node_prepare_resources(with_deadline(NodePrepareResourcesRequest { claims }))
                    .await
                    .map(|response| response.into_inner()),
                DraService::V1Beta1 => DraPluginBetaClient::new(self.channel.clone())
                    .node_prepare_resources(with_deadline(
                        dra_v1beta1::NodePrepareResourcesRequest { claims: to_v1beta1(claims) },
                    ))
                    .await
                    .map(|response| prepare_from_v1beta1(response.into_inner())),
            }
        };
        within_deadline(call).await.map(|response| response.claims)
    }

    /// Calls `NodeUnprepareResources` in the driver's version; the result is always v1.
    pub(crate) async fn unprepare(
        &self,
        claims: Vec<Claim>,
    ) -> Result<HashMap<String, NodeUnprepareResourceResponse>, Status> {
        let call = async {
            match self.service {
                DraService::V1 => DraPluginClient::new(self.channel.clone())
                    .node_unprepare_resources(with_deadline(NodeUnprepareResourcesRequest {
                        claims,
                    }))
                    .await
                    .map(|response| response.into_inner()),
                DraService::V1Beta1 => DraPluginBetaClient::new(self.channel.clone())
                    .node_unprepare_resources(with_deadline(
                        dra_v1beta1::NodeUnprepareResourcesRequest { claims: to_v1beta1(claims) },
                    ))
                    .await
                    .map(|response| unprepare_from_v1beta1(response.into_inner())),
            }
        };
        within_deadline(call).await.map(|response| response.claims)
    }
}

fn with_deadline<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL_TIMEOUT);
    request
}

async fn within_deadline<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    tokio::time::timeout(CALL_TIMEOUT, call)
        .await
        .unwrap_or_else(|_| Err(Status::deadline_exceeded("driver did not respond in time")))
}

fn to_v1beta1(claims: Vec<Claim>) -> Vec<dra_v1beta1::Claim> {
    claims
        .into_iter()
        .map(|Claim { namespace, uid, name }| dra_v1beta1::Claim { namespace, uid, name })
        .collect()
}

fn prepare_from_v1beta1(
    response: dra_v1beta1::NodePrepareResourcesResponse,
) -> NodePrepareResourcesResponse {
    let device = |device: dra_v1beta1::Device| Device {
        request_names: device.request_names,
        pool_name: device.pool_name,
        device_name: device.device_name,
        cdi_device_ids: device.cdi_device_ids,
        share_id: None,
    };
    let claims = response.claims.into_iter().map(|(uid, answer)| {
        let devices = answer.devices.into_iter().map(device).collect();
        (uid, NodePrepareResourceResponse { devices, error: answer.error })
    });
    NodePrepareResourcesResponse { claims: claims.collect() }
}

fn unprepare_from_v1beta1(
    response: dra_v1beta1::NodeUnprepareResourcesResponse,
) -> NodeUnprepareResourcesResponse {
    let claims = response
        .claims
        .into_iter()
        .map(|(uid, answer)| (uid, NodeUnprepareResourceResponse { error: answer.error }));
    NodeUnprepareResourcesResponse { claims: claims.collect() }
}

/// Authority header of kubelet 1.37.1. Drivers must accept both forms.
#[derive(Clone, Copy)]
pub(crate) enum Authority {
    /// Sent to a DRA socket.
    Localhost,
    /// Sent to a registration socket: its path, percent-encoded.
    SocketPath,
}

impl Authority {
    fn uri(self, socket: &Path) -> Result<Uri, http::uri::InvalidUri> {
        let authority = match self {
            Self::Localhost => "localhost".to_owned(),
            Self::SocketPath => socket.to_string_lossy().replace('/', "%2F"),
        };
        format!("http://{authority}").parse()
    }
}

/// Failure to create a channel to a socket.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChannelError {
    /// tonic accepts `%` in an authority only before an `@`, as client and as server.
    #[error("`{socket}` is not a valid authority: its name must contain an `@`", socket = .socket.display())]
    Authority {
        socket: PathBuf,
        #[source]
        source: http::uri::InvalidUri,
    },
    #[error("cannot connect")]
    Connection(#[from] tonic::transport::Error),
}

/// Opens a gRPC channel over a unix socket. `connections` counts open connections.
pub(crate) async fn channel(
    socket: &Path,
    authority: Authority,
    connections: Option<watch::Sender<usize>>,
) -> Result<Channel, ChannelError> {
    let uri = authority
        .uri(socket)
        .map_err(|source| ChannelError::Authority { socket: socket.to_owned(), source })?;
    let socket: Arc<Path> = socket.into();
    let connector = tower::service_fn(move |_: Uri| {
        let (socket, connections) = (socket.clone(), connections.clone());
        async move {
            let stream = UnixStream::connect(&socket).await?;
            Ok::<_, io::Error>(TokioIo::new(Connection::new(stream, connections)))
        }
    });
    Ok(Endpoint::from(uri).connect_with_connector(connector).await?)
}

/// A stream that is counted while it is open.
struct Connection {
    stream: UnixStream,
    open: Option<watch::Sender<usize>>,
}

impl Connection {
    fn new(stream: UnixStream, open: Option<watch::Sender<usize>>) -> Self {
        if let Some(open) = &open {
            open.send_modify(|count| *count += 1);
        }
        Self { stream, open }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(open) = &self.open {
            open.send_modify(|count| *count -= 1);
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
