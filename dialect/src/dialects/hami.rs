//! HAMi: `nvidia.com/gpu`, `gpumem`, `gpumem-percentage`, `gpucores`, `priority`.

use tessera_api::config::{
    ComputePolicy, ComputePriority, MemoryPercent, PlacementPolicy, TopologyMode, TopologyScope,
    TopologyTerm,
};

use super::reader::{annotation_path, limit_path, parse_bool};
use super::types::{Items, select_parts, select_uuids};
use super::{Defaults, Names, Read, Reader, Unlimited, at_least_one, owned};
use crate::ask::{ContainerAsk, MemoryAsk, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::{Container, Pod};
use crate::refusal::PodRefusal;
use crate::selector::Text;
use crate::settings::{Common, Entry, HamiSettings, SettingsError};

pub(super) const USE_TYPE: &str = "nvidia.com/use-gputype";
pub(super) const NO_USE_TYPE: &str = "nvidia.com/nouse-gputype";
const USE_UUID: &str = "nvidia.com/use-gpuuuid";
const NO_USE_UUID: &str = "nvidia.com/nouse-gpuuuid";
pub(super) const NUMA_BIND: &str = "nvidia.com/numa-bind";
const MODE: &str = "nvidia.com/vgpu-mode";
const NODE_POLICY: &str = "hami.io/node-scheduler-policy";
const GPU_POLICY: &str = "hami.io/gpu-scheduler-policy";
const WEIGHTS: &str = "hami.io/device-scoring-weights";
const CORE_POLICY_VARIABLE: &str = "GPU_CORE_UTILIZATION_POLICY";

impl Read for Entry<HamiSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::Hami
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            schedulers: &["", "default-scheduler", "hami-scheduler"],
            replaced_schedulers: &["hami-scheduler"],
            opt_out: &[("hami.io/webhook", "ignore")],
            unlimited: Some(Unlimited { variable: "CUDA_DISABLE_CONTROL", any_value: false }),
            refuses_node_name: true,
            ..Defaults::of(ComputePolicy::Balance)
        }
    }

    fn names(&self) -> Names {
        let own = &self.own;
        let resources = [
            &own.resource_name,
            &own.resource_mem,
            &own.resource_mem_percentage,
            &own.resource_cores,
            &own.resource_priority,
        ];
        Names {
            resources: resources.into_iter().cloned().collect(),
            annotations: owned(&[
                USE_TYPE,
                NO_USE_TYPE,
                USE_UUID,
                NO_USE_UUID,
                NUMA_BIND,
                MODE,
                NODE_POLICY,
                GPU_POLICY,
                WEIGHTS,
            ]),
            written: owned(&[
                "hami.io/vgpu-time",
                "hami.io/vgpu-node",
                "hami.io/bind-time",
                "hami.io/bind-phase",
                "hami.io/vgpu-devices-to-allocate",
                "hami.io/vgpu-devices-allocated",
                "hami.io/vgpu-mig-allocations",
            ]),
        }
    }

    fn check(&self) -> Result<(), SettingsError> {
        at_least_one(Dialect::Hami, "memoryFactor", self.own.memory_factor)
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        let share = |c: &Container<'_>, r: &mut Reader<'_>| container_share(&self.own, c, r);
        let containers = container_asks(pod, reader, share)?;
        let mut ask = reader.pod_ask(containers);
        read_annotations(pod, reader, &mut ask)?;
        Ok(ask)
    }
}

/// Returns the asks of the containers that `share` gives GPUs.
pub(super) fn container_asks(
    pod: &Pod<'_>,
    reader: &mut Reader<'_>,
    share: impl Fn(&Container<'_>, &mut Reader<'_>) -> Result<Option<(u64, ShareAsk)>, PodRefusal>,
) -> Result<Vec<ContainerAsk>, PodRefusal> {
    let mut containers = Vec::new();
    for (index, container) in pod.containers.iter().enumerate() {
        let Some((gpus, share)) = share(container, reader)? else { continue };
        set_limits(reader, index, gpus, share.memory);
        containers.push(ContainerAsk::of(index, gpus, share));
    }
    Ok(containers)
}

/// Returns the number of GPUs of a container and the share of each; `None` for none.
fn container_share(
    settings: &HamiSettings,
    container: &Container<'_>,
    reader: &mut Reader<'_>,
) -> Result<Option<(u64, ShareAsk)>, PodRefusal> {
    let amount = |name: &str| reader.amount(container, name);
    let count = amount(&settings.resource_name)?;
    let memory = amount(&settings.resource_mem)?;
    let percentage = amount(&settings.resource_mem_percentage)?;
    let cores = amount(&settings.resource_cores)?;
    let priority = priority(reader, container, &settings.resource_priority)?;
    let names_a_part = memory.is_some() || percentage.is_some() || cores.is_some();
    let gpus = match count {
        Some(count) => count,
        None if names_a_part => settings.default_gpus,
        None => 0,
    };
    if gpus == 0 {
        return Ok(None);
    }
    let percentage_field = || limit_path(container, &settings.resource_mem_percentage);
    if let Some(beyond) = percentage.filter(|percentage| *percentage > 100) {
        let problem = "expected a whole number from 0 to 100";
        return Err(reader.refusal(percentage_field(), beyond, problem));
    }
    let amount = match (memory.unwrap_or(0), percentage.unwrap_or(0)) {
        (0, 0 | 100) => MemoryAsk::All,
        (0, percentage) => MemoryPercent::from_hundredths(percentage * 100)
            .map_or(MemoryAsk::All, MemoryAsk::Percent),
        (units, _) => MemoryAsk::Mib(units.saturating_mul(settings.memory_factor)),
    };
    // A request for all memory that names no cores is one for all cores (HAMi 2.7 and later).
    let is_whole = percentage == Some(100) || (memory.is_none() && percentage.is_none());
    let cores = match cores {
        Some(cores) => cores.min(100),
        None if is_whole => 100,
        None => 0,
    };
    let mut share = ShareAsk {
        memory: amount,
        cores: u8::try_from(cores).unwrap_or(100),
        exclusive: cores == 100,
        ..ShareAsk::default()
    };
    if share.exclusive && matches!(amount, MemoryAsk::Percent(_)) {
        share.memory = reader.all_memory(percentage_field(), percentage.unwrap_or_default())?;
    }
    let mut share = share.with_policy(Some(compute_policy(container, reader)));
    share.compute.priority = priority;
    Ok(Some((gpus, share)))
}

/// Returns the policy that the container's environment names, or that of the settings.
fn compute_policy(container: &Container<'_>, reader: &Reader<'_>) -> ComputePolicy {
    match container.env(CORE_POLICY_VARIABLE) {
        Some("force" | "FORCE") => ComputePolicy::Fixed,
        Some("disable" | "DISABLE") => ComputePolicy::None,
        _ => reader.compute_policy(),
    }
}

/// Returns the priority of a container: 0 is high, 1 is low.
pub(super) fn priority(
    reader: &Reader<'_>,
    container: &Container<'_>,
    resource: &str,
) -> Result<Option<ComputePriority>, PodRefusal> {
    match reader.amount(container, resource)? {
        None => Ok(None),
        Some(0) => Ok(Some(ComputePriority::High)),
        Some(1) => Ok(Some(ComputePriority::Low)),
        Some(other) => {
            let field = limit_path(container, resource);
            Err(reader.refusal(field, other, "expected 0 (high) or 1 (low)"))
        }
    }
}

/// Sets the variables by which programs read their memory limits.
pub(super) fn set_limits(reader: &mut Reader<'_>, container: usize, gpus: u64, memory: MemoryAsk) {
    if let MemoryAsk::Mib(mib) = memory {
        for gpu in 0..gpus.min(crate::claim::MAX_DEVICES) {
            let name = format!("CUDA_DEVICE_MEMORY_LIMIT_{gpu}");
            reader.set_env(container, name, format!("{mib}m"));
        }
    }
}

fn read_annotations(
    pod: &Pod<'_>,
    reader: &mut Reader<'_>,
    ask: &mut PodAsk,
) -> Result<(), PodRefusal> {
    let types = (Text::PrefixedType, Items::Trimmed);
    ask.selectors.extend(select_parts(pod, reader, USE_TYPE, types, true)?);
    ask.selectors.extend(select_parts(pod, reader, NO_USE_TYPE, types, false)?);
    ask.selectors.extend(select_uuids(pod, reader, USE_UUID, true)?);
    ask.selectors.extend(select_uuids(pod, reader, NO_USE_UUID, false)?);
    ask.topology.extend(numa_bind(pod, reader));
    read_mode(pod, reader)?;
    match pod.annotation(NODE_POLICY) {
        None => {}
        Some("spread") => ask.placement.node = Some(PlacementPolicy::Spread),
        Some(_) => ask.placement.node = Some(PlacementPolicy::Binpack),
    }
    read_gpu_policy(pod, reader, ask)?;
    if let Some(weights) = pod.annotation(WEIGHTS) {
        let text = "weights of the placement cannot be set";
        reader.inexpressible(annotation_path(WEIGHTS), weights, text)?;
    }
    Ok(())
}

/// Returns the term of `numa-bind`: the GPUs of a container are on one NUMA node.
pub(super) fn numa_bind(pod: &Pod<'_>, reader: &mut Reader<'_>) -> Option<TopologyTerm> {
    let text = pod.annotation(NUMA_BIND)?;
    match parse_bool(text) {
        Some(true) => {
            Some(TopologyTerm { scope: TopologyScope::Numa, mode: TopologyMode::Require })
        }
        Some(false) => None,
        None => {
            reader.warn(annotation_path(NUMA_BIND), text, "is neither true nor false; ignored");
            None
        }
    }
}

fn read_mode(pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<(), PodRefusal> {
    let Some(modes) = pod.annotation(MODE) else { return Ok(()) };
    if modes.split(',').any(|mode| mode.trim() == "hami-core") {
        return Ok(());
    }
    let text = "the mode of a GPU cannot be chosen; the claim shares by the interceptor";
    reader.inexpressible(annotation_path(MODE), modes, text)
}

fn read_gpu_policy(
    pod: &Pod<'_>,
    reader: &mut Reader<'_>,
    ask: &mut PodAsk,
) -> Result<(), PodRefusal> {
    let Some(policies) = pod.annotation(GPU_POLICY) else { return Ok(()) };
    let term = |scope| TopologyTerm { scope, mode: TopologyMode::Prefer };
    for policy in policies.split(',').map(str::trim) {
        match policy {
            "binpack" => ask.placement.device = Some(PlacementPolicy::Binpack),
            "spread" => ask.placement.device = Some(PlacementPolicy::Spread),
            "numa" => ask.topology.push(term(TopologyScope::Numa)),
            "topology-aware" => {
                ask.topology.extend([term(TopologyScope::NvLink), term(TopologyScope::Pcie)]);
            }
            _ => {
                let text = "is no placement policy of a claim: binpack, spread, numa, \
                            topology-aware";
                reader.inexpressible(annotation_path(GPU_POLICY), policy, text)?;
            }
        }
    }
    Ok(())
}
