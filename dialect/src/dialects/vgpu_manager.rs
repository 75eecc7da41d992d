//! vgpu-manager: `nvidia.com/vgpu-number`, `vgpu-memory`, `vgpu-cores`.

use tessera_api::config::{
    ComputePolicy, PlacementPolicy, TopologyMode, TopologyScope, TopologyTerm,
};

use super::reader::{annotation_path, limit_path};
use super::types::{Items, select_parts};
use super::{Defaults, Names, Read, Reader, Unlimited, at_least_one};
use crate::ask::{ContainerAsk, MemoryAsk, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::{Container, Pod};
use crate::refusal::PodRefusal;
use crate::selector::Text;
use crate::settings::{Common, Entry, SettingsError, VgpuManagerSettings};

/// Most GPUs of a container there.
const MAX_GPUS: u64 = 16;
const TOPOLOGIES: &str = "none, numa, numa-strict, link, link-strict";

/// Annotations, without the domain.
const ANNOTATIONS: &[&str] = &[
    "node-scheduler-policy",
    "device-scheduler-policy",
    "memory-scheduler-policy",
    "device-topology-mode",
    "cross-pod-topology",
    "include-gpu-type",
    "exclude-gpu-type",
    "include-gpu-uuid",
    "exclude-gpu-uuid",
    "vgpu-compute-policy",
    "stuck-grace-period",
];

impl Read for Entry<VgpuManagerSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::VgpuManager
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            replaced_schedulers: &["vgpu-scheduler"],
            opt_out: &[("vgpu-manager.io/ignore-webhook", "true")],
            unlimited: Some(Unlimited { variable: "DISABLE_VGPU_CONTROL", any_value: false }),
            ..Defaults::of(ComputePolicy::Fixed)
        }
    }

    fn names(&self) -> Names {
        let named = |names: &[&str]| names.iter().map(|name| self.own.name(name)).collect();
        Names {
            resources: named(&["vgpu-number", "vgpu-memory", "vgpu-cores"]),
            annotations: named(ANNOTATIONS),
            written: named(&[
                "predicate-node",
                "predicate-time",
                "pre-allocated",
                "real-allocated",
            ]),
        }
    }

    fn check(&self) -> Result<(), SettingsError> {
        at_least_one(Dialect::VgpuManager, "memoryFactor", self.own.memory_factor)?;
        if topology(&self.own.default_topology).is_err() {
            return Err(SettingsError::Value {
                dialect: Dialect::VgpuManager,
                field: "defaultTopology",
                value: self.own.default_topology.clone(),
                allowed: "expected none, numa, numa-strict, link or link-strict",
            });
        }
        Ok(())
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        let policy = compute_policy(&self.own, pod, reader);
        let mut containers = Vec::new();
        for (index, container) in pod.containers.iter().enumerate() {
            let Some((gpus, share)) = container_share(&self.own, container, reader)? else {
                continue;
            };
            if let MemoryAsk::Mib(mib) = share.memory {
                for gpu in 0..gpus {
                    reader.set_env(index, format!("CUDA_MEM_LIMIT_{gpu}"), format!("{mib}m"));
                }
            }
            containers.push(ContainerAsk::of(index, gpus, share.with_policy(Some(policy))));
        }
        let mut ask = reader.pod_ask(containers);
        read_annotations(&self.own, pod, reader, &mut ask)?;
        let oversold = |container: &Container<'_>| {
            container
                .env("CUDA_MEM_OVERSOLD")
                .is_some_and(|value| value.eq_ignore_ascii_case("true"))
        };
        ask.oversubscribe |= pod.containers.iter().any(oversold);
        Ok(ask)
    }
}

impl VgpuManagerSettings {
    fn name(&self, name: &str) -> String {
        format!("{}/{name}", self.domain)
    }
}

fn container_share(
    settings: &VgpuManagerSettings,
    container: &Container<'_>,
    reader: &Reader<'_>,
) -> Result<Option<(u64, ShareAsk)>, PodRefusal> {
    let amount = |name: &str| Ok(reader.amount(container, &settings.name(name))?.unwrap_or(0));
    let (gpus, memory, cores) =
        (amount("vgpu-number")?, amount("vgpu-memory")?, amount("vgpu-cores")?);
    let gpus = if gpus == 0 && (memory > 0 || cores > 0) { 1 } else { gpus };
    if gpus == 0 {
        return Ok(None);
    }
    let refuse = |name: &str, value: u64, maximum: u64| {
        let field = limit_path(container, &settings.name(name));
        Err(reader.refusal(field, value, format!("request exceeds limit, maximum: {maximum}")))
    };
    if gpus > MAX_GPUS {
        return refuse("vgpu-number", gpus, MAX_GPUS);
    }
    let whole = if memory == 0 && cores == 0 { 100 } else { cores };
    let Some(cores) = u8::try_from(whole).ok().filter(|cores| *cores <= 100) else {
        return refuse("vgpu-cores", cores, 100);
    };
    let memory = match memory {
        0 => MemoryAsk::All,
        units => MemoryAsk::Mib(units.saturating_mul(settings.memory_factor)),
    };
    Ok(Some((gpus, ShareAsk { memory, cores, ..ShareAsk::default() })))
}

fn compute_policy(
    settings: &VgpuManagerSettings,
    pod: &Pod<'_>,
    reader: &mut Reader<'_>,
) -> ComputePolicy {
    let name = settings.name("vgpu-compute-policy");
    let Some(text) = pod.annotation(&name) else { return reader.compute_policy() };
    match text.to_ascii_lowercase().as_str() {
        "fixed" => ComputePolicy::Fixed,
        "balance" => ComputePolicy::Balance,
        "none" => ComputePolicy::None,
        _ => {
            reader.warn(annotation_path(&name), text, "expected fixed, balance or none; ignored");
            reader.compute_policy()
        }
    }
}

fn read_annotations(
    settings: &VgpuManagerSettings,
    pod: &Pod<'_>,
    reader: &mut Reader<'_>,
    ask: &mut PodAsk,
) -> Result<(), PodRefusal> {
    let lists = [
        ("include-gpu-type", Text::Product, true),
        ("exclude-gpu-type", Text::Product, false),
        ("include-gpu-uuid", Text::Uuid, true),
        ("exclude-gpu-uuid", Text::Uuid, false),
    ];
    for (name, text, wanted) in lists {
        let parts = (text, Items::Trimmed);
        ask.selectors.extend(select_parts(pod, reader, &settings.name(name), parts, wanted)?);
    }
    let named = |name: &str| {
        let name = settings.name(name);
        pod.annotation(&name).map(|value| (annotation_path(&name), value))
    };
    // The chart of vgpu-manager sets Binpack for both.
    ask.placement.node.get_or_insert(PlacementPolicy::Binpack);
    ask.placement.device.get_or_insert(PlacementPolicy::Binpack);
    for (name, policy) in [
        ("node-scheduler-policy", &mut ask.placement.node),
        ("device-scheduler-policy", &mut ask.placement.device),
    ] {
        let Some((field, value)) = named(name) else { continue };
        match value.to_ascii_lowercase().as_str() {
            "binpack" => *policy = Some(PlacementPolicy::Binpack),
            "spread" => *policy = Some(PlacementPolicy::Spread),
            "none" => *policy = None,
            _ => {
                reader.warn(field, value, "expected binpack, spread or none; the default order");
                *policy = None;
            }
        }
    }
    if let Some((_, value)) = named("memory-scheduler-policy") {
        ask.oversubscribe = value.to_ascii_lowercase().starts_with("virt");
    }
    if let Some((field, value)) = named("cross-pod-topology").filter(|(_, value)| *value == "true")
    {
        let text = "GPUs of several pods cannot be placed by NVLink";
        reader.inexpressible(field, value, text)?;
    }
    if ask.containers.iter().any(|container| container.gpus() > 1) {
        let mode = named("device-topology-mode");
        let text = mode.as_ref().map_or(settings.default_topology.as_str(), |(_, value)| value);
        match topology(text) {
            Ok(term) => ask.topology.extend(term),
            Err(()) => {
                let field = annotation_path(&settings.name("device-topology-mode"));
                reader.warn(field, text, &format!("expected one of {TOPOLOGIES}; ignored"));
            }
        }
    }
    Ok(())
}

fn topology(mode: &str) -> Result<Option<TopologyTerm>, ()> {
    let term = |scope, mode| Ok(Some(TopologyTerm { scope, mode }));
    match mode.to_ascii_lowercase().as_str() {
        "none" => Ok(None),
        "numa" => term(TopologyScope::Numa, TopologyMode::Prefer),
        "numa-strict" => term(TopologyScope::Numa, TopologyMode::Require),
        "link" => term(TopologyScope::NvLink, TopologyMode::Prefer),
        "link-strict" => term(TopologyScope::NvLink, TopologyMode::Require),
        _ => Err(()),
    }
}
