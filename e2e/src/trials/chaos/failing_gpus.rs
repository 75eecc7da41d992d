//! Failure and recovery of one GPU after the other, so that the driver writes slices.

use crate::inventory::{DRIVER, attribute};
use crate::operations::Operations;
use crate::random::Random;
use crate::trials::gpu::wait_taint;
use crate::trials::test_bed::TestBed;

/// A GPU of a node.
#[derive(Clone, Debug)]
struct NodeGpu {
    node: String,
    device: String,
    uuid: String,
}

/// GPUs of which at most one fails at the same time, so that all pods fit on the others.
pub(super) struct FailingGpus<'a> {
    operations: &'a Operations,
    random: Random,
    gpus: Vec<NodeGpu>,
    failed: Option<NodeGpu>,
}

impl<'a> FailingGpus<'a> {
    pub(super) async fn new(
        test_bed: &TestBed,
        operations: &'a Operations,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let inventory = test_bed.published_gpus().await?;
        let gpus = inventory.devices().filter_map(|((pool, name), device)| {
            let node = inventory.node_of(pool)?.to_owned();
            let uuid = attribute(device, "uuid").as_str()?.to_owned();
            Some(NodeGpu { node, device: name.clone(), uuid })
        });
        let gpus: Vec<_> = gpus.collect();
        anyhow::ensure!(!gpus.is_empty(), "{DRIVER} publishes no GPU");
        Ok(Self { operations, random: Random::new(seed), gpus, failed: None })
    }

    /// Recovers the failed GPU, or makes another one fail.
    pub(super) async fn toggle(&mut self) -> anyhow::Result<()> {
        if self.failed.is_some() {
            return self.recover().await;
        }
        let gpu = self.random.one_of(&self.gpus).clone();
        self.failed = Some(gpu.clone());
        self.operations
            .run(&["gpu", &gpu.node, "xid", &gpu.uuid, "119", "--recovery", "gpu-reset"])
            .await?;
        Ok(())
    }

    /// Recovers the failed GPU, if any.
    pub(super) async fn recover(&mut self) -> anyhow::Result<()> {
        if let Some(gpu) = self.failed.take() {
            self.operations.run(&["gpu", &gpu.node, "reset", &gpu.uuid]).await?;
        }
        Ok(())
    }

    /// Waits until every slice reports healthy GPUs.
    pub(super) async fn wait_published_healthy(&self, test_bed: &TestBed) -> anyhow::Result<()> {
        for gpu in &self.gpus {
            wait_taint(test_bed, &gpu.device, None).await?;
        }
        Ok(())
    }
}
