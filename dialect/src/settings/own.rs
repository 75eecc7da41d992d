//! Settings of single dialects.

use serde::Deserialize;

fn one() -> u64 {
    1
}

macro_rules! name_defaults {
    ($($function:ident = $name:literal;)+) => {
        $(fn $function() -> String { $name.to_owned() })+
    };
}

name_defaults! {
    nvidia_gpu = "nvidia.com/gpu";
    nvidia_memory = "nvidia.com/gpumem";
    nvidia_memory_percentage = "nvidia.com/gpumem-percentage";
    nvidia_cores = "nvidia.com/gpucores";
    nvidia_priority = "nvidia.com/priority";
    nvidia_domain = "nvidia.com";
    aws_vgpu = "k8s.amazonaws.com/vgpu";
}

/// Settings of HAMi's pods. The names are those of its chart.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HamiSettings {
    /// Number of GPUs.
    #[serde(default = "nvidia_gpu")]
    pub resource_name: String,
    /// Memory of each GPU.
    #[serde(default = "nvidia_memory")]
    pub resource_mem: String,
    /// Percentage of each GPU's memory.
    #[serde(default = "nvidia_memory_percentage")]
    pub resource_mem_percentage: String,
    /// Percentage of each GPU's compute.
    #[serde(default = "nvidia_cores")]
    pub resource_cores: String,
    /// Priority.
    #[serde(default = "nvidia_priority")]
    pub resource_priority: String,
    /// MiB in a unit of memory.
    #[serde(default = "one")]
    pub memory_factor: u64,
    /// GPUs of a container that names memory or cores only; 0: none.
    #[serde(default = "one")]
    pub default_gpus: u64,
}

impl Default for HamiSettings {
    fn default() -> Self {
        Self {
            resource_name: nvidia_gpu(),
            resource_mem: nvidia_memory(),
            resource_mem_percentage: nvidia_memory_percentage(),
            resource_cores: nvidia_cores(),
            resource_priority: nvidia_priority(),
            memory_factor: 1,
            default_gpus: 1,
        }
    }
}

/// Settings of 4paradigm's pods. The names are those of its chart.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FourParadigmSettings {
    /// Number of GPUs.
    #[serde(default = "nvidia_gpu")]
    pub resource_name: String,
    /// Memory of each GPU in MiB.
    #[serde(default = "nvidia_memory")]
    pub resource_mem: String,
    /// Percentage of each GPU's memory.
    #[serde(default = "nvidia_memory_percentage")]
    pub resource_mem_percentage: String,
    /// Percentage of each GPU's compute.
    #[serde(default = "nvidia_cores")]
    pub resource_cores: String,
    /// Priority.
    #[serde(default = "nvidia_priority")]
    pub resource_priority: String,
}

impl Default for FourParadigmSettings {
    fn default() -> Self {
        Self {
            resource_name: nvidia_gpu(),
            resource_mem: nvidia_memory(),
            resource_mem_percentage: nvidia_memory_percentage(),
            resource_cores: nvidia_cores(),
            resource_priority: nvidia_priority(),
        }
    }
}

/// Settings of vgpu-manager's pods.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VgpuManagerSettings {
    /// Domain of resources and annotations.
    #[serde(default = "nvidia_domain")]
    pub domain: String,
    /// MiB in a unit of memory: `deviceMemoryFactor` of its nodes.
    #[serde(default = "one")]
    pub memory_factor: u64,
    /// Topology of containers with several GPUs that name none, as in its annotation.
    #[serde(default = "numa")]
    pub default_topology: String,
}

fn numa() -> String {
    "numa".to_owned()
}

impl Default for VgpuManagerSettings {
    fn default() -> Self {
        Self { domain: nvidia_domain(), memory_factor: 1, default_topology: numa() }
    }
}

/// Settings of Volcano's pods.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolcanoSettings {
    /// MiB in a unit of memory: `gpuMemoryFactor`.
    #[serde(default = "one")]
    pub memory_factor: u64,
    /// True if `volcano.sh/vgpu-memory-percentage` is read: its ConfigMap names the resource.
    #[serde(default)]
    pub memory_percentage: bool,
}

impl Default for VolcanoSettings {
    fn default() -> Self {
        Self { memory_factor: 1, memory_percentage: false }
    }
}

/// Settings of KAI's pods.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KaiSettings {}

/// Sharing of a GPU by slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum SlotSharing {
    /// The containers take turns.
    TimeSlicing,
    /// NVIDIA's Multi-Process Service.
    #[serde(rename = "MPS")]
    Mps,
}

/// A resource of NVIDIA's device plugin.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NvidiaResource {
    /// Name of the resource.
    pub name: String,
    /// DeviceClass of its claims; by default the class of which
    /// `deviceclass.resource.kubernetes.io/CLASS` is the name, otherwise that of the settings.
    #[serde(default)]
    pub device_class: Option<String>,
    /// Slots per GPU; 1: whole GPUs.
    #[serde(default = "one")]
    pub replicas: u64,
    /// Sharing of a GPU that has several slots.
    #[serde(default = "time_slicing")]
    pub sharing: SlotSharing,
}

fn time_slicing() -> SlotSharing {
    SlotSharing::TimeSlicing
}

/// Settings of pods of NVIDIA's device plugin and GKE's.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NvidiaSettings {
    /// Resources that are read.
    #[serde(default = "whole_gpus")]
    pub resources: Vec<NvidiaResource>,
    /// True if GKE's node labels in `nodeSelector` select the number of slots.
    #[serde(default)]
    pub gke: bool,
}

fn whole_gpus() -> Vec<NvidiaResource> {
    let (name, sharing) = (nvidia_gpu(), SlotSharing::TimeSlicing);
    vec![NvidiaResource { name, device_class: None, replicas: 1, sharing }]
}

impl Default for NvidiaSettings {
    fn default() -> Self {
        Self { resources: whole_gpus(), gke: false }
    }
}

/// Settings of AWS virtual GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AwsSettings {
    /// Name of the resource.
    #[serde(default = "aws_vgpu")]
    pub resource_name: String,
    /// Virtual GPUs per GPU: `--vgpu` of the plugin.
    #[serde(default = "ten")]
    pub vgpus: u64,
    /// True if the claims share by MPS.
    #[serde(default)]
    pub mps: bool,
}

fn ten() -> u64 {
    10
}

impl Default for AwsSettings {
    fn default() -> Self {
        Self { resource_name: aws_vgpu(), vgpus: 10, mps: false }
    }
}

/// Settings of elastic-gpu-scheduler's pods.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ElasticSettings {}

/// Settings of KubeGPU's pods.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KubegpuSettings {
    /// Number of GPUs.
    #[serde(default = "nvidia_gpu")]
    pub resource_name: String,
}

impl Default for KubegpuSettings {
    fn default() -> Self {
        Self { resource_name: nvidia_gpu() }
    }
}

/// Unit of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum MemoryUnit {
    /// GiB.
    #[default]
    GiB,
    /// MiB.
    MiB,
}

/// Settings of Aliyun gpushare's pods.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpushareSettings {
    /// Unit of `aliyun.com/gpu-mem`: `--memory-unit` of the plugin.
    #[serde(default)]
    pub memory_unit: MemoryUnit,
}

/// Settings of gpu-manager's pods.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuManagerSettings {}
