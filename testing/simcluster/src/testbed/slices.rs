//! Waits until drivers have published their GPUs.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use futures::TryStreamExt;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use tessera_test_support::slices::nodes_with_whole_pool;

use super::node::DRIVER;

/// Time limit. A driver publishes within a second of its start; more on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Waits until each of the nodes has a complete pool with devices. A driver may publish before or
/// after it registers.
pub(crate) async fn wait_until_published(client: &Client, nodes: &[String]) -> anyhow::Result<()> {
    let mut missing = nodes.to_vec();
    let complete = async {
        let api: Api<ResourceSlice> = Api::all(client.clone());
        let config = watcher::Config::default().fields(&format!("spec.driver={DRIVER}"));
        let mut stream = Box::pin(watcher(api, config).default_backoff());
        let mut slices = BTreeMap::new();
        while !missing.is_empty() {
            match stream.try_next().await {
                Ok(Some(watcher::Event::Init)) => slices.clear(),
                Ok(Some(watcher::Event::Apply(slice) | watcher::Event::InitApply(slice))) => {
                    slices.insert(slice.name_any(), slice);
                }
                Ok(Some(watcher::Event::Delete(slice))) => drop(slices.remove(&slice.name_any())),
                // The watcher resumes by itself.
                Ok(_) | Err(_) => {}
            }
            let complete = nodes_with_whole_pool(slices.values());
            missing =
                nodes.iter().filter(|node| !complete.contains(node.as_str())).cloned().collect();
        }
    };
    let waited = tokio::time::timeout(TIMEOUT, complete).await;
    waited.with_context(|| {
        format!("no GPUs of {} were published within {TIMEOUT:?}", missing.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use kube::api::PostParams;
    use serde_json::json;
    use tessera_simcluster::cluster::{ClusterOptions, SimCluster};
    use tokio::time::timeout;

    use super::*;

    async fn publish(client: &Client, node: &str, number: i64, of: i64) {
        let slice = serde_json::from_value(json!({
            "metadata": {"name": format!("{node}-{number}")},
            "spec": {
                "driver": DRIVER, "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": of},
                "devices": [{"name": format!("gpu-{number}")}],
            },
        }));
        let slices: Api<ResourceSlice> = Api::all(client.clone());
        slices.create(&PostParams::default(), &slice.unwrap()).await.unwrap();
    }

    #[tokio::test]
    async fn waits_for_every_slice_of_every_node() {
        let cluster = SimCluster::start(ClusterOptions::default()).await.unwrap();
        let (client, nodes) = (cluster.client(), ["a".to_owned(), "b".to_owned()]);
        let mut waiting = Box::pin(wait_until_published(&client, &nodes));
        for (node, number, of) in [("a", 0, 2), ("b", 0, 1)] {
            publish(&client, node, number, of).await;
            let early = timeout(Duration::from_millis(200), &mut waiting).await;
            assert!(early.is_err(), "{node} has one slice of {of}");
        }
        publish(&client, "a", 1, 2).await;
        waiting.await.unwrap();
        cluster.stop().await;
    }
}
