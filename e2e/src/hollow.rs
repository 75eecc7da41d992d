//! Nodes without a kubelet: a Node object, kept ready, and a slice of GPUs. What is bound there never starts, so that
//! hundreds of pods cost what the control plane costs, and nothing else.

use std::convert::Infallible;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::{Value, json};

use crate::inventory::DRIVER;

/// Only it publishes GPUs, each instance those of its own node; so it is impersonated.
const PUBLISHER: &str = "system:serviceaccount:tessera-system:tessera-driver";

/// In which the API server takes the node that a service account's token is bound to.
const NODE_OF_TOKEN: &str = "impersonate-extra-authentication.kubernetes.io%2Fnode-name";

/// kube-controller-manager gives a node up that was silent for 50 s (`--node-monitor-grace-period`).
const HEARTBEAT: Duration = Duration::from_secs(10);

/// The label of all of them; its value says whose they are.
const LABEL: &str = "e2e.tessera.dev/hollow";

/// GPUs of one node.
const GPUS: usize = 8;

/// Some nodes without a kubelet.
pub struct HollowNodes {
    nodes: Api<Node>,
    names: Vec<String>,
    whose: String,
}

impl HollowNodes {
    /// Adds nodes of eight fenced GPUs of 80 GiB each.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn join(config: &Config, client: &Client, whose: &str, count: usize) -> anyhow::Result<Self> {
        let names = (1..=count).map(|number| format!("hollow-{number}")).collect();
        let hollow = Self { nodes: Api::all(client.clone()), names, whose: whose.to_owned() };
        hollow.leave().await?;
        for name in &hollow.names {
            let node = serde_json::from_value(hollow.node(name))?;
            let node = hollow.nodes.create(&PostParams::default(), &node).await?;
            let slices: Api<ResourceSlice> = Api::all(publisher(config, name)?);
            let slice = serde_json::from_value(slice(name, &node.uid().unwrap_or_default()))?;
            slices.create(&PostParams::default(), &slice).await?;
        }
        Ok(hollow)
    }

    /// What a pod needs in its spec to go there, and nowhere else.
    pub fn placement(&self) -> (Value, Value) {
        (json!({LABEL: self.whose}), json!([{"operator": "Exists"}]))
    }

    /// Keeps them ready; ends only with an error.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn keep_ready(&self) -> anyhow::Result<Infallible> {
        let mut beats = tokio::time::interval(HEARTBEAT);
        loop {
            beats.tick().await;
            for name in &self.names {
                let beat = json!({"status": {"conditions": [ready()]}});
                self.nodes.patch_status(name, &PatchParams::default(), &Patch::Strategic(beat)).await?;
            }
        }
    }

    /// Removes them. Their slices go with them.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn leave(&self) -> anyhow::Result<()> {
        for name in &self.names {
            match self.nodes.delete(name, &DeleteParams::default()).await {
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                answer => drop(answer?),
            }
        }
        Ok(())
    }

    fn node(&self, name: &str) -> Value {
        let amounts = json!({"cpu": "1000", "memory": "1000Gi", "pods": "1000"});
        json!({
            "metadata": {"name": name, "labels": {LABEL: self.whose, "kubernetes.io/hostname": name}},
            "spec": {"taints": [{"key": LABEL, "effect": "NoSchedule"}]},
            "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready()]},
        })
    }
}

fn publisher(config: &Config, node: &str) -> anyhow::Result<Client> {
    let mut config = config.clone();
    config.auth_info.impersonate = Some(PUBLISHER.to_owned());
    config.headers.push((NODE_OF_TOKEN.parse()?, node.parse()?));
    Ok(Client::try_from(config)?)
}

fn ready() -> Value {
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    json!({"type": "Ready", "status": "True", "reason": "Hollow", "message": "nothing runs here",
        "lastHeartbeatTime": now, "lastTransitionTime": now})
}

/// As the driver publishes them, with the fence.
fn slice(node: &str, uid: &str) -> Value {
    let devices: Vec<Value> = (0..GPUS).map(device).collect();
    json!({
        "metadata": {"name": format!("000-{DRIVER}-{node}"), "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid, "controller": true},
        ]},
        "spec": {"driver": DRIVER, "nodeName": node, "devices": devices,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}},
    })
}

fn device(index: usize) -> Value {
    json!({
        "name": format!("gpu-{index}"),
        "allowMultipleAllocations": true,
        "attributes": {"type": {"string": "gpu"}, "productName": {"string": "Hollow"}, "index": {"int": index}},
        "capacity": {
            "memory": {"value": "80Gi",
                "requestPolicy": {"default": "80Gi", "validRange": {"min": "1Mi", "step": "1Mi"}}},
            "cores": {"value": "100", "requestPolicy": {"default": "0", "validRange": {"min": "0", "step": "1"}}},
        },
        "taints": [{"key": format!("{DRIVER}/managed"), "effect": "NoSchedule"}],
    })
}
