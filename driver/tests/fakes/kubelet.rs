//! A fake kubelet: finds the registration socket, registers the driver, and calls its endpoint.

use std::{collections::BTreeMap, path::Path, time::Duration};

use tessera_proto::{
    dra_v1::{self, dra_plugin_client::DraPluginClient},
    health_v1::dra_resource_health_client::DraResourceHealthClient,
    registration::{
        InfoRequest, PluginInfo, RegistrationStatus, registration_client::RegistrationClient,
    },
};
use tonic::transport::{Channel, Endpoint};

/// A kubelet that has registered a driver.
pub struct Kubelet {
    pub info: PluginInfo,
    pub channel: Channel,
}

/// The answer for a claim.
pub type Answer = Result<Vec<dra_v1::Device>, String>;

impl Kubelet {
    /// Registers the driver whose registration socket is below this root.
    pub async fn register(root: &Path) -> Self {
        let mut sockets = std::fs::read_dir(root.join("plugins_registry")).expect("the registry");
        let socket = sockets.next().expect("a registration socket").expect("an entry").path();
        let mut registration = RegistrationClient::new(connect(&socket).await);
        let info = registration.get_info(InfoRequest {}).await.expect("an answer").into_inner();
        let channel = connect(Path::new(&info.endpoint)).await;
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        registration.notify_registration_status(status).await.expect("an answer");
        Self { info, channel }
    }

    pub fn dra(&self) -> DraPluginClient<Channel> {
        DraPluginClient::new(self.channel.clone())
    }

    pub fn health(&self) -> DraResourceHealthClient<Channel> {
        DraResourceHealthClient::new(self.channel.clone())
    }

    /// Prepares claims in one call. Returns the answers by UID.
    pub async fn prepare_all(&self, claims: Vec<dra_v1::Claim>) -> BTreeMap<String, Answer> {
        let request = dra_v1::NodePrepareResourcesRequest { claims };
        let answer =
            self.dra().node_prepare_resources(request).await.expect("an answer").into_inner();
        let claims = answer.claims.into_iter();
        claims
            .map(|(uid, claim)| {
                (uid, if claim.error.is_empty() { Ok(claim.devices) } else { Err(claim.error) })
            })
            .collect()
    }

    pub async fn prepare(&self, claim: dra_v1::Claim) -> Answer {
        let uid = claim.uid.clone();
        let mut answers = self.prepare_all(vec![claim]).await;
        assert_eq!(answers.len(), 1, "there is one answer per claim");
        answers.remove(&uid).expect("the claim")
    }

    pub async fn unprepare(&self, claim: dra_v1::Claim) -> Result<(), String> {
        let uid = claim.uid.clone();
        let request = dra_v1::NodeUnprepareResourcesRequest { claims: vec![claim] };
        let mut answer =
            self.dra().node_unprepare_resources(request).await.expect("an answer").into_inner();
        assert_eq!(answer.claims.len(), 1, "there is one answer per claim");
        let error = answer.claims.remove(&uid).expect("the claim").error;
        if error.is_empty() { Ok(()) } else { Err(error) }
    }
}

/// Connects, and retries while the socket does not listen yet, as the real kubelet does.
async fn connect(socket: &Path) -> Channel {
    let endpoint =
        Endpoint::from_shared(format!("unix://{}", socket.display())).expect("an address");
    for _ in 0..60_000 {
        if let Ok(channel) = endpoint.connect().await {
            return channel;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("no process listens at {}", socket.display())
}
