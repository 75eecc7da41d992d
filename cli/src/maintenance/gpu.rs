//! Names of GPUs on the command line.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::tree::{GpuTree, GpuView, NodeView};

/// A GPU as users name it: `NODE/GPU`, the GPU by its index, device name or UUID.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuName {
    node: String,
    gpu: String,
}

/// Error returned for a name of another form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be NODE/GPU, with the index, device name or UUID of the GPU, such as node-a/0 \
     (`kubectl tessera tree` shows them)"
)]
pub struct InvalidGpuName;

impl FromStr for GpuName {
    type Err = InvalidGpuName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (node, gpu) = text.split_once('/').ok_or(InvalidGpuName)?;
        if node.is_empty() || gpu.is_empty() || gpu.contains('/') {
            return Err(InvalidGpuName);
        }
        Ok(Self { node: node.to_owned(), gpu: gpu.to_owned() })
    }
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.gpu)
    }
}

/// A GPU of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TargetGpu {
    /// Its node, which is also the name of its pool.
    pub node: String,
    /// The device's name.
    pub device: String,
}

impl fmt::Display for TargetGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.device)
    }
}

/// Error returned for a GPU that does not exist, or cannot be taken out of service.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnknownGpu {
    /// The node publishes no GPUs.
    #[error(
        "node `{0}` publishes no GPUs through Tessera (list nodes with `kubectl tessera tree`)"
    )]
    Node(String),
    /// The node has no such GPU.
    #[error("node {node} has no GPU `{gpu}`; it has {known}")]
    Gpu {
        /// The node.
        node: String,
        /// The GPU as the user named it.
        gpu: String,
        /// The GPUs that there are.
        known: String,
    },
    /// The GPU is in MIG mode: a DeviceTaintRule names one device, and it has many.
    #[error(
        "GPU `{gpu}` of node {node} is in MIG mode: its MIG devices cannot be cordoned or drained \
         as one GPU; use `kubectl cordon` and `kubectl drain` on the node"
    )]
    MigMode {
        /// The node.
        node: String,
        /// The GPU as the user named it.
        gpu: String,
    },
}

/// Returns the GPU of the tree with this name.
///
/// # Errors
/// [`UnknownGpu`].
pub fn resolve<'t>(
    tree: &'t GpuTree,
    name: &GpuName,
) -> Result<(TargetGpu, &'t GpuView), UnknownGpu> {
    let node = tree.nodes.iter().find(|node| node.name == name.node);
    let node = node.ok_or_else(|| UnknownGpu::Node(name.node.clone()))?;
    let gpu = node.gpus.iter().find(|gpu| is_called(gpu, &name.gpu));
    let gpu = gpu.ok_or_else(|| UnknownGpu::Gpu {
        node: node.name.clone(),
        gpu: name.gpu.clone(),
        known: known(node),
    })?;
    if gpu.mig {
        return Err(UnknownGpu::MigMode { node: node.name.clone(), gpu: name.gpu.clone() });
    }
    Ok((TargetGpu { node: node.name.clone(), device: gpu.device.clone() }, gpu))
}

fn is_called(gpu: &GpuView, name: &str) -> bool {
    gpu.device == name
        || gpu.uuid.as_deref() == Some(name)
        || gpu.index.is_some_and(|index| index.to_string() == name)
}

/// Returns the GPUs of a node as text.
fn known(node: &NodeView) -> String {
    let name = |gpu: &GpuView| match gpu.index {
        Some(index) => format!("{index} ({})", gpu.device),
        None => gpu.device.clone(),
    };
    let names: Vec<String> = node.gpus.iter().map(name).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_a_node_and_a_gpu() {
        let parsed: GpuName = "node-a/0".parse().expect("a name");
        assert_eq!(parsed.to_string(), "node-a/0");
        for wrong in ["node-a", "/0", "node-a/", "node-a/0/1", ""] {
            assert_eq!(wrong.parse::<GpuName>(), Err(InvalidGpuName), "{wrong}");
        }
    }
}
