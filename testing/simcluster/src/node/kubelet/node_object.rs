//! The Node object.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

/// Returns the object of a ready node.
pub(crate) fn node(
    name: &str,
    mut labels: BTreeMap<String, String>,
    allocatable: &BTreeMap<String, String>,
    address: Ipv4Addr,
    port: u16,
) -> Value {
    labels.insert("kubernetes.io/hostname".into(), name.into());
    labels.insert("kubernetes.io/os".into(), "linux".into());
    labels.insert("kubernetes.io/arch".into(), "amd64".into());
    let now = Timestamp::now().to_string();
    let condition = |kind: &str, status: &str, reason: &str| json!({"type": kind, "status": status, "reason": reason, "lastHeartbeatTime": now, "lastTransitionTime": now});
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": {
            "capacity": allocatable,
            "allocatable": allocatable,
            "addresses": [
                {"type": "InternalIP", "address": address.to_string()},
                {"type": "Hostname", "address": name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "nodeInfo": {
                "kubeletVersion": "v1.37.0-simcluster", "kubeProxyVersion": "", "containerRuntimeVersion": "simcluster://1",
                "operatingSystem": "linux", "architecture": "amd64", "osImage": "", "kernelVersion": "",
                "machineID": "", "systemUUID": "", "bootID": "",
            },
            "conditions": [
                condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
                condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
                condition("PIDPressure", "False", "KubeletHasSufficientPID"),
                condition("Ready", "True", "KubeletReady"),
            ],
        },
    })
}

/// Creates the object, or updates that of an earlier kubelet.
pub(crate) async fn register(client: &Client, node: &Value) -> Result<(), kube::Error> {
    let api: Api<Node> = Api::all(client.clone());
    let object: Node = serde_json::from_value(node.clone()).map_err(kube::Error::SerdeError)?;
    match api.create(&PostParams::default(), &object).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        Err(error) => return Err(error),
    }
    let name = object.metadata.name.unwrap_or_default();
    let patch = json!({"metadata": {"labels": node["metadata"]["labels"]}});
    api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await?;
    let patch = json!({"status": node["status"]});
    api.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch)).await?;
    Ok(())
}
