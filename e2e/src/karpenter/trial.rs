//! The trial: nodes are added for waiting pods, as many as are needed, and removed when they are
//! empty.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceRequestAllocationResult, ResourceClaim, ResourceClaimTemplate,
};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tessera_api::slice::Fence;

use super::hosts::Hosts;
use crate::inventory::DRIVER;
use crate::wait::{self, CheckResult};

/// Time limit of each part. Karpenter collects pods for up to 10 s, and looks for empty nodes every
/// 10 s.
const LIMIT: Duration = Duration::from_secs(180);

const NAMESPACE: &str = "default";

/// Runs the trial on a control plane with Karpenter, without nodes. Prints a line for each part.
///
/// # Errors
/// A part fails, or the API server refuses a request.
pub async fn run(client: &Client, fence: Fence) -> anyhow::Result<()> {
    let hosts = Hosts::new(client, fence);
    let created = hosts.created();
    tokio::select! {
        never = hosts.run() => match never? {},
        result = Trial::new(client).run() => result?,
    }
    let created = created.load(Ordering::Relaxed);
    anyhow::ensure!(created == 2, "Karpenter has created {created} nodes");
    Ok(())
}

struct Trial {
    pods: Api<Pod>,
    nodes: Api<Node>,
    claims: Api<ResourceClaim>,
    templates: Api<ResourceClaimTemplate>,
    began: Instant,
}

impl Trial {
    fn new(client: &Client) -> Self {
        Self {
            pods: Api::namespaced(client.clone(), NAMESPACE),
            nodes: Api::all(client.clone()),
            claims: Api::namespaced(client.clone(), NAMESPACE),
            templates: Api::namespaced(client.clone(), NAMESPACE),
            began: Instant::now(),
        }
    }

    async fn run(mut self) -> anyhow::Result<()> {
        self.create_template("half", "40Gi").await?;
        self.create_template("whole", "80Gi").await?;
        anyhow::ensure!(self.count_nodes().await? == 0, "the cluster has nodes already");

        self.create("first", "half").await?;
        self.wait_running("first").await?;
        self.wait_nodes(1, "a waiting pod gets a node").await?;

        self.create("second", "half").await?;
        self.create("third", "whole").await?;
        self.wait_running("second").await?;
        self.wait_running("third").await?;
        self.wait_nodes(1, "pods that fit beside it get none").await?;

        self.create("fourth", "whole").await?;
        self.wait_running("fourth").await?;
        self.wait_nodes(2, "a pod that does not fit gets a second one").await?;

        self.delete("fourth").await?;
        self.wait_nodes(1, "the empty node is removed").await?;
        for pod in ["first", "second", "third"] {
            self.wait_running(pod).await?;
            self.delete(pod).await?;
        }
        self.wait_nodes(0, "the last node is removed").await
    }

    async fn create_template(&self, name: &str, memory: &str) -> anyhow::Result<()> {
        let request = json!({"name": "gpu", "exactly": {
            "deviceClassName": DRIVER, "capacity": {"requests": {"memory": memory}},
        }});
        let template = serde_json::from_value(json!({
            "metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": [request]}}},
        }))?;
        self.templates.create(&PostParams::default(), &template).await?;
        Ok(())
    }

    async fn create(&self, name: &str, template: &str) -> anyhow::Result<()> {
        let pod = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "containers": [{
                    "name": "main", "image": "registry.example.com/main:1",
                    "resources": {"requests": {"cpu": "1"}, "claims": [{"name": "gpu"}]},
                }],
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": template}],
            },
        }))?;
        self.pods.create(&PostParams::default(), &pod).await?;
        Ok(())
    }

    async fn delete(&self, name: &str) -> anyhow::Result<()> {
        self.pods.delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Waits until the pod runs, and checks that Tessera has allocated its claim there.
    async fn wait_running(&self, name: &str) -> anyhow::Result<()> {
        let node = |pod: Option<&Pod>| {
            let phase = pod.and_then(|pod| pod.status.as_ref()?.phase.as_deref());
            let node = pod.and_then(|pod| pod.spec.as_ref()?.node_name.clone());
            match node.filter(|_| phase == Some("Running")) {
                Some(node) => CheckResult::Done(node),
                None => CheckResult::Pending(format!("{phase:?}")),
            }
        };
        let what = format!("pod {name} to run");
        let node = wait::until_one(self.pods.clone(), name, &what, LIMIT, node).await?;
        let claims = self.claims.list(&ListParams::default()).await?;
        let of_pod = |claim: &&ResourceClaim| {
            claim.owner_references().iter().any(|owner| owner.name == name)
        };
        let claim = claims.iter().find(of_pod);
        let status = claim.and_then(|claim| claim.status.as_ref());
        let devices = status.and_then(|status| status.allocation.as_ref()?.devices.as_ref());
        let results = devices.and_then(|devices| devices.results.as_deref()).unwrap_or_default();
        let is_share = |result: &DeviceRequestAllocationResult| {
            result.driver == DRIVER && result.pool == node && result.share_id.is_some()
        };
        anyhow::ensure!(
            !results.is_empty() && results.iter().all(is_share),
            "pod {name} on {node} has {results:?}"
        );
        Ok(())
    }

    async fn count_nodes(&self) -> anyhow::Result<usize> {
        Ok(self.nodes.list(&ListParams::default()).await?.items.len())
    }

    async fn wait_nodes(&mut self, number: usize, what: &str) -> anyhow::Result<()> {
        let check = |nodes: &[Node]| {
            CheckResult::done_if(nodes.len() == number, || format!("{} nodes", nodes.len()))
        };
        let (nodes, all) = (self.nodes.clone(), watcher::Config::default());
        wait::until(nodes, all, &format!("{number} nodes: {what}"), LIMIT, check).await?;
        let took = self.began.elapsed();
        self.began = Instant::now();
        println!("{number} nodes: {what} ({:.0} s)", took.as_secs_f64());
        Ok(())
    }
}
