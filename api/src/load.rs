//! Load of the GPUs of a node: what its driver answers at [`PATH`], and the controller places pods
//! by (`placement.device: LeastLoaded`).

use serde::{Deserialize, Serialize};

use crate::names::GpuUuid;

/// Path on the metrics port of the driver.
pub const PATH: &str = "/load";

/// Load of the published GPUs of a node. A GPU whose load is unknown is missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeLoad {
    /// The GPUs, by UUID.
    pub gpus: Vec<GpuLoad>,
}

/// Load of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuLoad {
    /// UUID of the GPU.
    pub uuid: GpuUuid,
    /// Percent of the last minute in which the GPU ran kernels, by NVML.
    pub busy_percent: u8,
    /// Reserved compute of the shares whose work `busy_percent` contains, in percent of the GPU.
    /// Those of younger shares are expected in addition.
    pub settled_cores_percent: u32,
}
