//! Trial of the migration from HAMi (docs/operator/migrate.md): one manifest, one node and one
//! namespace at a time, and back. Resources of a node simulate
//! HAMi's device plugin.

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::dialect_pods::dialect_manifest;
use super::dialects::{label, select, template_of, wait_created};
use super::other_allocator::{devices_of, set_capacity, wait_node_event, wait_published};
use super::test_bed::{TestBed, phase};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;

/// Resources that HAMi's device plugin registers, with their amounts.
const OLD_RESOURCES: [(&str, &str); 3] =
    [("nvidia.com/gpu", "40"), ("nvidia.com/gpumem", "163840"), ("nvidia.com/gpucores", "400")];

/// A node and a namespace move from HAMi to Tessera, and back.
pub(super) async fn there_and_back(test_bed: TestBed) -> TrialOutcome {
    let node = test_bed.node_with("a100", 4).await?;
    let all = devices_of(&test_bed.published_gpus().await?, &node);
    let old = OldSystem { test_bed: &test_bed, node: &node };
    let outcome = old.migrate(&all).await;
    old.leave().await?;
    outcome?;
    wait_published(&test_bed.client, &node, &all).await?;
    Ok(Outcome::Passed(vec![]))
}

/// The old system: its device plugin runs on one node.
struct OldSystem<'a> {
    test_bed: &'a TestBed,
    node: &'a str,
}

impl OldSystem<'_> {
    async fn migrate(&self, all: &[String]) -> anyhow::Result<()> {
        let Self { test_bed, node } = *self;
        self.arrive().await.context("the old system runs")?;
        self.wait_not_converted().await?;
        let before = self.run("before", None).await.context("a pod of the old system")?;
        anyhow::ensure!(node_of(&before) == node, "on {}", node_of(&before));

        select(test_bed, "hami").await.context("the namespace moves")?;
        let moved = self.run("moved", None).await.context("the same pod after that")?;
        anyhow::ensure!(template_of(&moved).is_some(), "it is not converted");
        anyhow::ensure!(node_of(&moved) != node, "on a node of the old system");
        anyhow::ensure!(
            phase(&self.read("before").await?) == "Running",
            "the old pod is disturbed"
        );

        test_bed.delete(&["before"]).await?;
        self.leave().await.context("the node moves")?;
        wait_published(&test_bed.client, node, all).await?;
        let there = self.run("there", Some(node)).await.context("a pod on the moved node")?;
        anyhow::ensure!(template_of(&there).is_some(), "it is not converted");

        self.arrive().await.context("the node goes back")?;
        label(test_bed, Value::Null).await?;
        self.wait_not_converted().await?;
        let back = self.run("back", None).await.context("the same pod after that")?;
        anyhow::ensure!(node_of(&back) == node && template_of(&back).is_none(), "not the old way");
        test_bed.check_undisturbed(&there).await.context("a pod that had a claim there")?;
        test_bed.delete(&["moved", "there", "back"]).await
    }

    /// Starts the old device plugin on the node: Tessera withdraws its GPUs.
    async fn arrive(&self) -> anyhow::Result<()> {
        let client = &self.test_bed.client;
        for (resource, amount) in OLD_RESOURCES {
            set_capacity(client, self.node, resource, json!(amount)).await?;
        }
        wait_published(client, self.node, &[]).await?;
        wait_node_event(client, self.node, "nvidia.com/gpu").await
    }

    /// Removes the old device plugin from the node.
    async fn leave(&self) -> anyhow::Result<()> {
        for (resource, _) in OLD_RESOURCES {
            set_capacity(&self.test_bed.client, self.node, resource, Value::Null).await?;
        }
        Ok(())
    }

    /// Creates the pod as its user wrote it, and waits until it runs. It needs no CUDA: no
    /// device plugin injects it.
    async fn run(&self, name: &str, node: Option<&str>) -> anyhow::Result<Pod> {
        self.test_bed.create(manifest(name, node)?).await?;
        self.test_bed.wait_running(name).await
    }

    async fn read(&self, name: &str) -> anyhow::Result<Pod> {
        Ok(self.test_bed.pods().get(name).await?)
    }

    /// Waits until pods of the namespace are created as they are.
    async fn wait_not_converted(&self) -> anyhow::Result<()> {
        let is_left = |pod: &Pod| template_of(pod).is_none();
        wait_created(self.test_bed, &manifest("probe", None)?, "left as it is", is_left).await
    }
}

fn manifest(name: &str, node: Option<&str>) -> anyhow::Result<Value> {
    let mut manifest = dialect_manifest("hami", name)?;
    let spec = manifest["spec"].as_object_mut().context("a spec")?;
    if let Some(node) = node {
        spec.insert("nodeSelector".into(), json!({"kubernetes.io/hostname": node}));
    }
    let container = manifest["spec"]["containers"][0].as_object_mut().context("a container")?;
    container.insert("image".into(), "tessera/pause:e2e".into());
    container.remove("command");
    Ok(manifest)
}

fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}
