//! Tests of every service over a Unix socket, with the calls of the kubelet.

use std::{collections::HashMap, path::Path};

use tessera_proto::{dra_v1, dra_v1beta1, health_v1, health_v1alpha1, registration};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint, Server},
};

struct Plugin;

#[tonic::async_trait]
impl registration::registration_server::Registration for Plugin {
    async fn get_info(
        &self,
        _: Request<registration::InfoRequest>,
    ) -> Result<Response<registration::PluginInfo>, Status> {
        Ok(Response::new(registration::PluginInfo {
            r#type: tessera_proto::PLUGIN_TYPE.into(),
            name: "gpu.example".into(),
            endpoint: "/plugins/dra.sock".into(),
            supported_versions: vec![tessera_proto::SUPPORTS_DRA_V1.into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<registration::RegistrationStatus>,
    ) -> Result<Response<registration::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            Ok(Response::new(Default::default()))
        } else {
            Err(Status::aborted(status.error))
        }
    }
}

#[tonic::async_trait]
impl dra_v1::dra_plugin_server::DraPlugin for Plugin {
    async fn node_prepare_resources(
        &self,
        request: Request<dra_v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra_v1::NodePrepareResourcesResponse>, Status> {
        let device = |claim: &dra_v1::Claim| dra_v1::Device {
            request_names: vec!["gpu".into()],
            pool_name: claim.namespace.clone(),
            device_name: claim.name.clone(),
            cdi_device_ids: vec!["a/b=c".into()],
            share_id: Some(format!("share-of-{}", claim.uid)),
        };
        let claims = request.into_inner().claims;
        Ok(Response::new(dra_v1::NodePrepareResourcesResponse {
            claims: claims
                .iter()
                .map(|claim| {
                    let answer = dra_v1::NodePrepareResourceResponse {
                        devices: vec![device(claim)],
                        error: String::new(),
                    };
                    (claim.uid.clone(), answer)
                })
                .collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<dra_v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra_v1::NodeUnprepareResourcesResponse>, Status> {
        let claims = request
            .into_inner()
            .claims
            .into_iter()
            .map(|claim| (claim.uid, Default::default()))
            .collect();
        Ok(Response::new(dra_v1::NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl dra_v1beta1::dra_plugin_server::DraPlugin for Plugin {
    async fn node_prepare_resources(
        &self,
        _: Request<dra_v1beta1::NodePrepareResourcesRequest>,
    ) -> Result<Response<dra_v1beta1::NodePrepareResourcesResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn node_unprepare_resources(
        &self,
        _: Request<dra_v1beta1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<dra_v1beta1::NodeUnprepareResourcesResponse>, Status> {
        Ok(Response::new(Default::default()))
    }
}

macro_rules! health_service {
    ($version:ident) => {
        #[tonic::async_trait]
        impl $version::dra_resource_health_server::DraResourceHealth for Plugin {
            type NodeWatchResourcesStream = tokio_stream::Iter<
                std::vec::IntoIter<Result<$version::NodeWatchResourcesResponse, Status>>,
            >;

            async fn node_watch_resources(
                &self,
                _: Request<$version::NodeWatchResourcesRequest>,
            ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
                let device = $version::DeviceHealth {
                    device: Some($version::DeviceIdentifier {
                        pool_name: "p".into(),
                        device_name: "d".into(),
                    }),
                    health: $version::HealthStatus::Unhealthy.into(),
                    last_updated_time: 7,
                    health_check_timeout_seconds: 0,
                    message: "fell off the bus".into(),
                };
                let messages = vec![
                    Ok($version::NodeWatchResourcesResponse::default()),
                    Ok($version::NodeWatchResourcesResponse { devices: vec![device] }),
                ];
                Ok(Response::new(tokio_stream::iter(messages)))
            }
        }
    };
}
health_service!(health_v1);
health_service!(health_v1alpha1);

/// Serves all five services at `socket` while the runtime runs.
fn serve(socket: &Path) {
    let listener = UnixListener::bind(socket).expect("a socket in a new directory");
    let server = Server::builder()
        .add_service(registration::registration_server::RegistrationServer::new(Plugin))
        .add_service(dra_v1::dra_plugin_server::DraPluginServer::new(Plugin))
        .add_service(dra_v1beta1::dra_plugin_server::DraPluginServer::new(Plugin))
        .add_service(health_v1::dra_resource_health_server::DraResourceHealthServer::new(Plugin))
        .add_service(health_v1alpha1::dra_resource_health_server::DraResourceHealthServer::new(
            Plugin,
        ))
        .serve_with_incoming(UnixListenerStream::new(listener));
    tokio::spawn(server);
}

async fn connect(socket: &Path) -> Channel {
    let address = format!("unix://{}", socket.display());
    Endpoint::from_shared(address).expect("an address").connect().await.expect("a connection")
}

/// Returns a served directory and a connected channel.
async fn served() -> (tempfile::TempDir, Channel) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let socket = directory.path().join("dra.sock");
    serve(&socket);
    let channel = connect(&socket).await;
    (directory, channel)
}

#[tokio::test]
async fn registration_returns_info_and_receives_status() {
    let (_directory, channel) = served().await;
    let mut client = registration::registration_client::RegistrationClient::new(channel);

    let info = client.get_info(registration::InfoRequest {}).await.expect("an answer").into_inner();
    assert_eq!((info.r#type.as_str(), info.endpoint.as_str()), ("DRAPlugin", "/plugins/dra.sock"));

    let failed = registration::RegistrationStatus {
        plugin_registered: false,
        error: "no such version".into(),
    };
    let error = client
        .notify_registration_status(failed)
        .await
        .expect_err("the fake plugin returns an error");
    assert_eq!(error.message(), "no such version");
}

#[tokio::test]
async fn dra_v1_returns_share_id_of_each_claim() {
    let (_directory, channel) = served().await;
    let mut client = dra_v1::dra_plugin_client::DraPluginClient::new(channel);
    let claim =
        |uid: &str| dra_v1::Claim { namespace: "ns".into(), uid: uid.into(), name: "claim".into() };

    let request = dra_v1::NodePrepareResourcesRequest { claims: vec![claim("u1"), claim("u2")] };
    let answer = client.node_prepare_resources(request).await.expect("an answer").into_inner();

    let shares: HashMap<_, _> = answer
        .claims
        .iter()
        .map(|(uid, claim)| (uid.as_str(), claim.devices[0].share_id.as_deref()))
        .collect();
    assert_eq!(shares, HashMap::from([("u1", Some("share-of-u1")), ("u2", Some("share-of-u2"))]));

    let request = dra_v1::NodeUnprepareResourcesRequest { claims: vec![claim("u1")] };
    let answer = client.node_unprepare_resources(request).await.expect("an answer").into_inner();
    assert_eq!(answer.claims["u1"].error, "");
}

#[tokio::test]
async fn both_dra_versions_are_served_on_one_socket() {
    let (_directory, channel) = served().await;
    let mut client = dra_v1beta1::dra_plugin_client::DraPluginClient::new(channel);
    let answer =
        client.node_prepare_resources(dra_v1beta1::NodePrepareResourcesRequest::default()).await;
    assert!(answer.expect("an answer").into_inner().claims.is_empty());
}

#[tokio::test]
async fn both_health_versions_stream_messages() {
    let (_directory, channel) = served().await;

    let mut client =
        health_v1::dra_resource_health_client::DraResourceHealthClient::new(channel.clone());
    let request = health_v1::NodeWatchResourcesRequest {};
    let mut stream = client.node_watch_resources(request).await.expect("a stream").into_inner();
    assert_eq!(
        stream.message().await.expect("a message").map(|first| first.devices.len()),
        Some(0)
    );
    let second = stream.message().await.expect("a message").expect("the second one");
    assert_eq!(second.devices[0].health(), health_v1::HealthStatus::Unhealthy);

    let mut client =
        health_v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let request = health_v1alpha1::NodeWatchResourcesRequest {};
    let mut stream = client.node_watch_resources(request).await.expect("a stream").into_inner();
    assert!(stream.message().await.expect("a message").is_some());
}

#[test]
fn service_names_match_kubelet() {
    assert_eq!(registration::registration_server::SERVICE_NAME, "pluginregistration.Registration");
    assert_eq!(dra_v1::dra_plugin_server::SERVICE_NAME, "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin");
    assert_eq!(
        dra_v1beta1::dra_plugin_server::SERVICE_NAME,
        "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"
    );
    assert_eq!(health_v1::dra_resource_health_server::SERVICE_NAME, "v1.DRAResourceHealth");
    assert_eq!(
        health_v1alpha1::dra_resource_health_server::SERVICE_NAME,
        "v1alpha1.DRAResourceHealth"
    );
}

#[test]
fn device_encoding_matches_kubelet_field_numbers() {
    let device = dra_v1::Device {
        request_names: vec!["r".into()],
        pool_name: "p".into(),
        device_name: "d".into(),
        cdi_device_ids: vec!["c".into()],
        share_id: Some("s".into()),
    };
    // Field n, wire type 2 (length-delimited) is n << 3 | 2.
    let expected = [10, 1, b'r', 18, 1, b'p', 26, 1, b'd', 34, 1, b'c', 42, 1, b's'];
    assert_eq!(prost::Message::encode_to_vec(&device), expected);
}
