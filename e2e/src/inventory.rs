//! Which GPUs the cluster has, as its ResourceSlices say.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::api::ListParams;
use kube::runtime::watcher;
use kube::{Api, Client};
use serde_json::Value;
use tessera_test_support::slices::nodes_with_whole_pool;
use tokio::sync::OnceCell;

use crate::wait::{self, Verdict, WaitError};

/// Time for drivers to publish their GPUs.
const PATIENCE: Duration = Duration::from_secs(300);

/// The driver under test.
pub const DRIVER: &str = "gpu.tessera.dev";

/// Devices by pool and name.
#[derive(Clone, Debug, Default)]
pub struct GpuInventory {
    devices: BTreeMap<(String, String), Device>,
    nodes: BTreeMap<String, String>,
}

impl GpuInventory {
    /// Reads the slices of the driver under test.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn read(client: &Client) -> Result<Self, kube::Error> {
        let api: Api<ResourceSlice> = Api::all(client.clone());
        let slices =
            api.list(&ListParams::default().fields(&format!("spec.driver={DRIVER}"))).await?;
        Ok(Self::of(slices.items))
    }

    /// The inventory of these slices. Older generations of a pool do not count.
    pub fn of(slices: Vec<ResourceSlice>) -> Self {
        let mut generations: BTreeMap<String, i64> = BTreeMap::new();
        for slice in &slices {
            let newest = generations.entry(slice.spec.pool.name.clone()).or_default();
            *newest = (*newest).max(slice.spec.pool.generation);
        }
        let mut inventory = Self::default();
        for slice in slices {
            let pool = slice.spec.pool;
            if pool.generation < generations[&pool.name] {
                continue;
            }
            inventory.nodes.insert(pool.name.clone(), slice.spec.node_name.unwrap_or_default());
            for device in slice.spec.devices.into_iter().flatten() {
                inventory.devices.insert((pool.name.clone(), device.name.clone()), device);
            }
        }
        inventory
    }

    /// The first node with at least `count` GPUs whose product name has that word, in whatever
    /// case.
    pub fn node_with(&self, word: &str, count: usize) -> Option<&str> {
        let word = word.to_lowercase();
        self.nodes.iter().find_map(|(pool, node)| {
            let of_pool = self.devices.iter().filter(|((of, _), _)| of == pool);
            let matching = of_pool.filter(|(_, device)| {
                let name = attribute(device, "productName");
                name.as_str()
                    .is_some_and(|name| name.to_lowercase().split(' ').any(|part| part == word))
            });
            (matching.count() >= count).then_some(node.as_str())
        })
    }

    /// The node of a pool.
    pub fn node_of(&self, pool: &str) -> Option<&str> {
        self.nodes.get(pool).map(String::as_str)
    }

    /// A published device.
    pub fn device(&self, pool: &str, name: &str) -> Option<&Device> {
        self.devices.get(&(pool.to_owned(), name.to_owned()))
    }

    /// All published devices, by pool and name.
    pub fn devices(&self) -> impl Iterator<Item = (&(String, String), &Device)> {
        self.devices.iter()
    }

    /// The nodes that publish a pool.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.values().map(String::as_str)
    }

    /// The first device of a pool, by name.
    pub fn first_of(&self, pool: &str) -> Option<&str> {
        self.devices.keys().find(|(of, _)| of == pool).map(|(_, name)| name.as_str())
    }

    /// How many devices are published.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }
}

/// The nodes that published GPUs when they were first looked at. Clones are of the same look.
#[derive(Clone, Debug, Default)]
pub struct GpuNodes(Arc<OnceCell<BTreeSet<String>>>);

impl GpuNodes {
    /// Waits until all of them publish every slice of their pool. A kubelet that starts deletes the
    /// slices of its node, and the driver publishes them anew: a test that reads them in
    /// between finds no GPUs there.
    ///
    /// # Errors
    /// [`WaitError`]; at the first look also without a node that publishes.
    pub async fn publish(&self, client: &Client) -> Result<(), WaitError> {
        let slices: Api<ResourceSlice> = Api::all(client.clone());
        let selector = watcher::Config::default().fields(&format!("spec.driver={DRIVER}"));
        let first = self.0.get().cloned();
        let judge = |slices: &[ResourceSlice]| {
            let publishing: BTreeSet<String> =
                nodes_with_whole_pool(slices).into_iter().map(str::to_owned).collect();
            let missing = match &first {
                Some(nodes) => {
                    nodes.difference(&publishing).cloned().collect::<Vec<_>>().join(", ")
                }
                None if publishing.is_empty() => "any".to_owned(),
                None => String::new(),
            };
            if missing.is_empty() {
                Verdict::Done(publishing)
            } else {
                Verdict::NotYet(format!("not {missing}"))
            }
        };
        let what = "all nodes to publish their GPUs";
        let publishing = wait::until(slices, selector, what, PATIENCE, judge).await?;
        self.0.get_or_init(async || publishing).await;
        Ok(())
    }
}

/// An attribute's value, whatever its type; `null` without one.
pub fn attribute(device: &Device, name: &str) -> Value {
    let attributes = device.attributes.as_ref();
    let value = attributes.and_then(|attributes| {
        attributes.get(name).or_else(|| attributes.get(&format!("{DRIVER}/{name}")))
    });
    let value = value.and_then(|value| serde_json::to_value(value).ok()).unwrap_or_default();
    value.as_object().and_then(|fields| fields.values().next().cloned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(pool: &str, generation: i64, products: &[&str]) -> ResourceSlice {
        let devices: Vec<_> = products
            .iter()
            .enumerate()
            .map(|(i, product)| json!({"name": format!("gpu-{i}"), "attributes": {"productName": {"string": product}}}))
            .collect();
        serde_json::from_value(json!({
            "metadata": {"name": format!("{pool}-{generation}")},
            "spec": {"driver": DRIVER, "nodeName": format!("node-of-{pool}"), "devices": devices,
                "pool": {"name": pool, "generation": generation, "resourceSliceCount": 1}},
        }))
        .unwrap()
    }

    #[test]
    fn a_node_is_found_by_a_whole_word_of_its_product_name_and_enough_of_them() {
        let inventory = GpuInventory::of(vec![
            slice("a", 1, &["NVIDIA A100 80GB PCIe"; 4]),
            slice("b", 1, &["NVIDIA H100 80GB HBM3"; 8]),
        ]);
        assert_eq!(inventory.node_with("h100", 8), Some("node-of-b"));
        assert_eq!(inventory.node_with("a100", 5), None);
        assert_eq!(inventory.node_with("a10", 1), None);
    }

    #[test]
    fn node_publishes_once_its_pool_is_whole() {
        let node = BTreeSet::from(["node-of-a"]);
        let [old, new] = [slice("a", 1, &["T4"]), slice("a", 2, &["T4"])];
        assert_eq!(nodes_with_whole_pool(&[]), BTreeSet::new());
        assert_eq!(nodes_with_whole_pool(&[slice("a", 1, &[])]), BTreeSet::new());
        assert_eq!(nodes_with_whole_pool(&[old, new.clone()]), node);
        let mut of_two = [new.clone(), new];
        for slice in &mut of_two {
            slice.spec.pool.resource_slice_count = 2;
        }
        assert_eq!(nodes_with_whole_pool(&of_two[..1]), BTreeSet::new());
        assert_eq!(nodes_with_whole_pool(&of_two), node);
    }

    #[test]
    fn only_the_newest_generation_of_a_pool_counts() {
        let inventory = GpuInventory::of(vec![slice("a", 1, &["T4"; 4]), slice("a", 2, &["T4"])]);
        assert_eq!(inventory.len(), 1);
    }
}
