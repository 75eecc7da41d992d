//! A small DRA driver: responds as scripted and records its calls.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures::{Stream, StreamExt};
use tessera_proto::dra_v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use tessera_proto::dra_v1::*;
use tessera_proto::dra_v1beta1::{self, dra_plugin_server::DraPlugin as BetaPlugin};
use tessera_proto::health_v1::dra_resource_health_server::{
    DraResourceHealth, DraResourceHealthServer,
};
use tessera_proto::health_v1::{NodeWatchResourcesRequest, NodeWatchResourcesResponse};
use tessera_proto::registration::registration_server::{Registration, RegistrationServer};
use tessera_proto::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tessera_proto::{PLUGIN_TYPE, SUPPORTS_DRA_V1, SUPPORTS_DRA_V1BETA1, SUPPORTS_HEALTH_V1};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tonic::{Request, Response, Status};

pub(crate) const DRIVER: &str = "gpu.example.com";

/// A recorded call: its name and the names of its claims.
pub(crate) type Call = (&'static str, Vec<String>);

/// Script and records, shared with the test.
#[derive(Clone)]
pub(crate) struct Script {
    calls: watch::Sender<Vec<Call>>,
    /// Errors by claim name. Any other claim gets one device with one CDI id.
    errors: Arc<Mutex<BTreeMap<String, String>>>,
    health: watch::Sender<NodeWatchResourcesResponse>,
    pub(crate) status: watch::Sender<Option<RegistrationStatus>>,
    cdi: PathBuf,
}

impl Script {
    pub(crate) fn new(cdi: PathBuf) -> Self {
        Self {
            calls: watch::Sender::new(Vec::new()),
            errors: Arc::default(),
            health: watch::Sender::new(NodeWatchResourcesResponse::default()),
            status: watch::Sender::new(None),
            cdi,
        }
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.borrow().clone()
    }

    /// Waits until `count` calls were made, and returns them.
    pub(crate) async fn wait_for_calls(&self, count: usize) -> Vec<Call> {
        let mut calls = self.calls.subscribe();
        calls.wait_for(|calls| calls.len() >= count).await.unwrap().clone()
    }

    pub(crate) fn fail(&self, claim: &str, error: &str) {
        self.errors.lock().unwrap().insert(claim.into(), error.into());
    }

    pub(crate) fn succeed(&self, claim: &str) {
        self.errors.lock().unwrap().remove(claim);
    }

    pub(crate) fn report(&self, devices: Vec<tessera_proto::health_v1::DeviceHealth>) {
        self.health.send_replace(NodeWatchResourcesResponse { devices });
    }

    fn record(&self, call: &'static str, claims: &[Claim]) {
        let names = claims.iter().map(|claim| claim.name.clone()).collect();
        self.calls.send_modify(|calls| calls.push((call, names)));
    }

    fn error(&self, claim: &Claim) -> String {
        self.errors.lock().unwrap().get(&claim.name).cloned().unwrap_or_default()
    }

    fn write_spec(&self, claim: &Claim) {
        let spec = serde_json::json!({
            "cdiVersion": "0.5.0", "kind": "example.com/claim",
            "devices": [{"name": claim.uid, "containerEdits": {"env": [format!("CLAIM={}", claim.name)]}}],
        });
        std::fs::write(self.cdi.join(format!("{}.json", claim.uid)), spec.to_string()).unwrap();
    }
}

#[tonic::async_trait]
impl DraPlugin for Script {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.record("prepare", &claims);
        let answer = |claim: &Claim| {
            self.write_spec(claim);
            let device = Device {
                request_names: vec!["gpu".into()],
                pool_name: "pool".into(),
                device_name: "device".into(),
                cdi_device_ids: vec![format!("example.com/claim={}", claim.uid)],
                share_id: None,
            };
            (
                claim.uid.clone(),
                NodePrepareResourceResponse { devices: vec![device], error: self.error(claim) },
            )
        };
        Ok(Response::new(NodePrepareResourcesResponse {
            claims: claims.iter().map(answer).collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.record("unprepare", &claims);
        let answer = |claim: &Claim| {
            (claim.uid.clone(), NodeUnprepareResourceResponse { error: self.error(claim) })
        };
        Ok(Response::new(NodeUnprepareResourcesResponse {
            claims: claims.iter().map(answer).collect(),
        }))
    }
}

#[tonic::async_trait]
impl BetaPlugin for Script {
    async fn node_prepare_resources(
        &self,
        request: Request<dra_v1beta1::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra_v1beta1::NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter();
        let claims = claims
            .map(|claim| Claim { namespace: claim.namespace, uid: claim.uid, name: claim.name })
            .collect();
        let newer = Request::new(NodePrepareResourcesRequest { claims });
        let answer = DraPlugin::node_prepare_resources(self, newer).await?.into_inner();
        let older = |device: Device| dra_v1beta1::Device {
            request_names: device.request_names,
            pool_name: device.pool_name,
            device_name: device.device_name,
            cdi_device_ids: device.cdi_device_ids,
        };
        let claims: HashMap<_, _> = answer
            .claims
            .into_iter()
            .map(|(uid, answer)| {
                let devices = answer.devices.into_iter().map(older).collect();
                (uid, dra_v1beta1::NodePrepareResourceResponse { devices, error: answer.error })
            })
            .collect();
        Ok(Response::new(dra_v1beta1::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        _: Request<dra_v1beta1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra_v1beta1::NodeUnprepareResourcesResponse>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }
}

#[tonic::async_trait]
impl DraResourceHealth for Script {
    type NodeWatchResourcesStream =
        Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        Ok(Response::new(Box::pin(WatchStream::new(self.health.subscribe()).map(Ok))))
    }
}

struct Registrar {
    endpoint: String,
    versions: Vec<String>,
    status: watch::Sender<Option<RegistrationStatus>>,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: PLUGIN_TYPE.into(),
            name: DRIVER.into(),
            endpoint: self.endpoint.clone(),
            supported_versions: self.versions.clone(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.status.send_replace(Some(request.into_inner()));
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Running servers. Dropping them ends them, like a killed driver.
pub(crate) struct Plugin {
    _servers: JoinSet<()>,
    sockets: [PathBuf; 2],
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.sockets.iter().for_each(|socket| drop(std::fs::remove_file(socket)));
    }
}

impl Plugin {
    /// Serves a driver of the current version with health.
    pub(crate) fn serve(kubelet_root: &Path, script: &Script) -> Self {
        Self::serve_versions(
            kubelet_root,
            script,
            &[SUPPORTS_DRA_V1, SUPPORTS_DRA_V1BETA1, SUPPORTS_HEALTH_V1],
        )
    }

    pub(crate) fn serve_versions(kubelet_root: &Path, script: &Script, versions: &[&str]) -> Self {
        let directory = kubelet_root.join("plugins").join(DRIVER);
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::create_dir_all(kubelet_root.join("plugins_registry")).unwrap();
        let endpoint = directory.join("dra.sock");
        let registration = kubelet_root.join("plugins_registry").join(format!("{DRIVER}@reg.sock"));
        let mut servers = JoinSet::new();
        let dra = tonic::transport::Server::builder()
            .add_service(DraPluginServer::new(script.clone()))
            .add_service(dra_v1beta1::dra_plugin_server::DraPluginServer::new(script.clone()))
            .add_service(DraResourceHealthServer::new(script.clone()));
        let listener = UnixListenerStream::new(UnixListener::bind(&endpoint).unwrap());
        servers.spawn(async move { dra.serve_with_incoming(listener).await.unwrap() });
        let registrar = Registrar {
            endpoint: endpoint.display().to_string(),
            versions: versions.iter().map(|version| (*version).to_owned()).collect(),
            status: script.status.clone(),
        };
        let registry =
            tonic::transport::Server::builder().add_service(RegistrationServer::new(registrar));
        let listener = UnixListenerStream::new(UnixListener::bind(&registration).unwrap());
        servers.spawn(async move { registry.serve_with_incoming(listener).await.unwrap() });
        Self { _servers: servers, sockets: [endpoint, registration] }
    }
}
