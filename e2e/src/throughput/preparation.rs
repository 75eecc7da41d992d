//! Preparation of a new control plane for a load: everything is in force and ready.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::PostParams;
use kube::runtime::watcher;
use kube::{Api, Client};
use serde_json::json;

use crate::inventory::DRIVER;
use crate::wait::{self, CheckResult};

/// Time limit of each preparation step. kube-controller-manager removes the taints of new nodes
/// under its own client limits, one request per node.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);

/// Additional time limit for each node to be ready: 5,000 nodes took 57 s on two idle cores.
const TIME_PER_NODE: Duration = Duration::from_millis(100);

/// Interval between requests that test whether the admission policies are in force. No watch
/// reports that.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Namespace of the pods, which are the cluster's only load.
pub(crate) const NAMESPACE: &str = "default";

/// Creates PriorityClasses with these names and values.
pub(crate) async fn priority_classes(
    client: &Client,
    classes: &[(&str, i32)],
) -> anyhow::Result<()> {
    let api: Api<PriorityClass> = Api::all(client.clone());
    for (name, value) in classes {
        let class = json!({"metadata": {"name": name}, "value": value});
        api.create(&PostParams::default(), &serde_json::from_value(class)?).await?;
    }
    Ok(())
}

/// Waits until the administrator is denied to publish a GPU; only the policies deny it.
pub(crate) async fn wait_policies_in_force(client: &Client) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let forged = serde_json::from_value(json!({
        "metadata": {"name": "forged"},
        "spec": {"driver": DRIVER, "nodeName": "forged", "pool": {"name": "forged", "generation": 1, "resourceSliceCount": 1}},
    }))?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let mut ticks = tokio::time::interval(RETRY_INTERVAL);
    let denied = async {
        loop {
            ticks.tick().await;
            match slices.create(&dry_run, &forged).await {
                Err(kube::Error::Api(status))
                    if status.message.contains("only tessera-driver publishes") =>
                {
                    break Ok(());
                }
                Ok(_) => {}
                Err(error) => break Err(error),
            }
        }
    };
    let waited = tokio::time::timeout(TIMEOUT, denied).await;
    Ok(waited.map_err(|_| {
        anyhow::anyhow!("the admission policies are not in force after {TIMEOUT:?}")
    })??)
}

/// Waits until kube-controller-manager has created the default service account.
pub(crate) async fn wait_default_service_account(client: &Client) -> anyhow::Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
    let check = |account: Option<&ServiceAccount>| {
        account.map_or_else(
            || CheckResult::Pending("it does not exist".to_owned()),
            |_| CheckResult::Done(()),
        )
    };
    Ok(wait::until_one(accounts, "default", "the default service account", TIMEOUT, check).await?)
}

/// Waits until kube-controller-manager has removed its taints from the nodes. New nodes have
/// `not-ready`.
pub(crate) async fn wait_nodes_schedulable(client: &Client, nodes: u32) -> anyhow::Result<()> {
    let api: Api<Node> = Api::all(client.clone());
    let check = |seen: &[Node]| {
        let is_free = |node: &&Node| {
            let mut taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
            !taints.any(|taint| taint.key.starts_with("node.kubernetes.io/"))
        };
        let free = seen.iter().filter(is_free).count();
        CheckResult::done_if(free >= nodes as usize, || format!("{free} of {nodes} nodes"))
    };
    let what = "the nodes to be free of the taint node.kubernetes.io/not-ready";
    let limit = TIMEOUT + TIME_PER_NODE * nodes;
    Ok(wait::until(api, watcher::Config::default(), what, limit, check).await?)
}
