//! GPUs of the cluster, as published in ResourceSlices.

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

use crate::wait::{self, CheckResult, WaitError};

/// Time limit for drivers to publish their GPUs.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Name of the DRA driver under test.
pub const DRIVER: &str = "gpu.tessera.dev";

/// The chart's label of the driver's pods.
pub const DRIVER_LABEL: &str = "app.kubernetes.io/name=tessera-driver";

/// Published devices by pool and name.
#[derive(Clone, Debug, Default)]
pub struct GpuInventory {
    devices: BTreeMap<(String, String), Device>,
    nodes: BTreeMap<String, String>,
}

impl GpuInventory {
    /// Reads the slices of the driver under test.
    ///
    /// # Errors
    /// Returns an error if the API server cannot list the slices.
    pub async fn read(client: &Client) -> Result<Self, kube::Error> {
        let api: Api<ResourceSlice> = Api::all(client.clone());
        let slices =
            api.list(&ListParams::default().fields(&format!("spec.driver={DRIVER}"))).await?;
        Ok(Self::from_slices(slices.items))
    }

    /// Creates the inventory of these slices. Older generations of a pool are ignored.
    pub fn from_slices(slices: Vec<ResourceSlice>) -> Self {
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

    /// Returns the first node with at least `count` GPUs of a product. `word` is a word of the
    /// product name; case is ignored.
    pub fn node_with(&self, word: &str, count: usize) -> Option<&str> {
        let word = word.to_lowercase();
        self.nodes.iter().find_map(|(pool, node)| {
            let matching = self.of_pool(pool).filter(|(_, device)| {
                let name = attribute(device, "productName");
                name.as_str()
                    .is_some_and(|name| name.to_lowercase().split(' ').any(|part| part == word))
            });
            (matching.count() >= count).then_some(node.as_str())
        })
    }

    /// Returns the node of a pool.
    pub fn node_of(&self, pool: &str) -> Option<&str> {
        self.nodes.get(pool).map(String::as_str)
    }

    /// Returns a published device.
    pub fn device(&self, pool: &str, name: &str) -> Option<&Device> {
        self.devices.get(&(pool.to_owned(), name.to_owned()))
    }

    /// Returns all published devices, by pool and name.
    pub fn devices(&self) -> impl Iterator<Item = (&(String, String), &Device)> {
        self.devices.iter()
    }

    /// Returns the names and devices of a pool.
    pub fn of_pool(&self, pool: &str) -> impl Iterator<Item = (&str, &Device)> {
        let devices = self.devices.iter().filter(move |((of, _), _)| of == pool);
        devices.map(|((_, name), device)| (name.as_str(), device))
    }

    /// Returns the nodes that publish a pool.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.values().map(String::as_str)
    }

    /// Returns the name of the first device of a pool.
    pub fn first_of(&self, pool: &str) -> Option<&str> {
        self.of_pool(pool).next().map(|(name, _)| name)
    }

    /// Returns the number of published devices.
    pub fn len(&self) -> usize {
        self.devices.len()
    }

    /// Returns true if no device is published.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }
}

/// Nodes that published GPUs at the first check. Clones share the result.
#[derive(Clone, Debug, Default)]
pub struct GpuNodes(Arc<OnceCell<BTreeSet<String>>>);

impl GpuNodes {
    /// Waits until each of these nodes publishes every slice of its pool, and returns what they
    /// publish then. A starting kubelet deletes the slices of its node and the driver publishes
    /// them again, so a list that is read later may lack a node's GPUs.
    ///
    /// # Errors
    /// Returns a [`WaitError`] if a node does not publish in time, or if no node does at the first
    /// check.
    pub async fn inventory(&self, client: &Client) -> Result<GpuInventory, WaitError> {
        let slices: Api<ResourceSlice> = Api::all(client.clone());
        let selector = watcher::Config::default().fields(&format!("spec.driver={DRIVER}"));
        let first = self.0.get().cloned();
        let check = |slices: &[ResourceSlice]| {
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
                CheckResult::Done((publishing, GpuInventory::from_slices(slices.to_vec())))
            } else {
                CheckResult::Pending(format!("not published: {missing}"))
            }
        };
        let what = "all nodes to publish their GPUs";
        let (publishing, inventory) = wait::until(slices, selector, what, TIMEOUT, check).await?;
        self.0.get_or_init(async || publishing).await;
        Ok(inventory)
    }
}

/// Returns the value of a device attribute of any type; `null` if the device lacks it.
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
    fn finds_node_by_word_of_product_name_and_count() {
        let inventory = GpuInventory::from_slices(vec![
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
    fn ignores_older_pool_generations() {
        let inventory =
            GpuInventory::from_slices(vec![slice("a", 1, &["T4"; 4]), slice("a", 2, &["T4"])]);
        assert_eq!(inventory.len(), 1);
    }
}
