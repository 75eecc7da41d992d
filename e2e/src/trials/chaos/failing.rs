//! One GPU after the other fails and recovers, so that the driver has slices to write.

use crate::inventory::{DRIVER, GpuInventory, attribute};
use crate::operations::Operations;
use crate::random::Random;
use crate::trials::bench::Bench;
use crate::trials::gpu::taint_is;

/// A GPU of a node.
#[derive(Clone, Debug)]
struct Gpu {
    node: String,
    device: String,
    uuid: String,
}

/// The GPUs, of which one at most fails at a time: the others have room for all pods.
pub(super) struct FailingGpus<'a> {
    hands: &'a Operations,
    random: Random,
    gpus: Vec<Gpu>,
    failing: Option<Gpu>,
}

impl<'a> FailingGpus<'a> {
    pub(super) async fn of(
        bench: &Bench,
        hands: &'a Operations,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let inventory = GpuInventory::read(&bench.client).await?;
        let gpus = inventory.devices().filter_map(|((pool, name), device)| {
            let node = inventory.node_of(pool)?.to_owned();
            let uuid = attribute(device, "uuid").as_str()?.to_owned();
            Some(Gpu { node, device: name.clone(), uuid })
        });
        let gpus: Vec<_> = gpus.collect();
        anyhow::ensure!(!gpus.is_empty(), "{DRIVER} publishes nothing");
        Ok(Self { hands, random: Random::new(seed), gpus, failing: None })
    }

    /// The one that fails recovers, or another one begins to fail.
    pub(super) async fn change(&mut self) -> anyhow::Result<()> {
        if self.failing.is_some() {
            return self.recover().await;
        }
        let gpu = self.random.one_of(&self.gpus).clone();
        self.failing = Some(gpu.clone());
        self.hands
            .run(&["gpu", &gpu.node, "xid", &gpu.uuid, "119", "--recovery", "gpu-reset"])
            .await?;
        Ok(())
    }

    /// None fails any more.
    pub(super) async fn recover(&mut self) -> anyhow::Result<()> {
        if let Some(gpu) = self.failing.take() {
            self.hands.run(&["gpu", &gpu.node, "reset", &gpu.uuid]).await?;
        }
        Ok(())
    }

    /// Waits until every slice says so.
    pub(super) async fn published_whole(&self, bench: &Bench) -> anyhow::Result<()> {
        for gpu in &self.gpus {
            taint_is(bench, &gpu.device, None).await?;
        }
        Ok(())
    }
}
