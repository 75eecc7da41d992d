//! Volcano: `volcano.sh/vgpu-number`, `vgpu-memory`, `vgpu-cores`, and the older `gpu-memory` and
//! `gpu-number`.

use tessera_api::config::{ComputePolicy, MemoryPercent};

use super::hami::{NO_USE_TYPE, USE_TYPE, set_limits};
use super::reader::{annotation_path, limit_path};
use super::types::{Items, select_uuids, select_wanted_or_not};
use super::{Defaults, Names, Read, Reader, Unlimited, at_least_one, owned};
use crate::ask::{ContainerAsk, MemoryAsk, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::{Container, Kind, Pod};
use crate::refusal::PodRefusal;
use crate::selector::Text;
use crate::settings::{Common, Entry, SettingsError, VolcanoSettings};

const NUMBER: &str = "volcano.sh/vgpu-number";
const MEMORY: &str = "volcano.sh/vgpu-memory";
const CORES: &str = "volcano.sh/vgpu-cores";
const PERCENTAGE: &str = "volcano.sh/vgpu-memory-percentage";
const GPU_MEMORY: &str = "volcano.sh/gpu-memory";
const GPU_NUMBER: &str = "volcano.sh/gpu-number";
const USE_UUID: &str = "volcano.sh/vgpu-use-gpuuuid";
const NO_USE_UUID: &str = "volcano.sh/vgpu-nouse-gpuuuid";
const MODE: &str = "volcano.sh/vgpu-mode";
const PODGROUP_POLICY: &str = "volcano.sh/vgpu-podgroup-policy";

impl Read for Entry<VolcanoSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::Volcano
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            unlimited: Some(Unlimited { variable: "CUDA_DISABLE_CONTROL", any_value: true }),
            ..Defaults::of(ComputePolicy::Balance)
        }
    }

    fn names(&self) -> Names {
        Names {
            resources: owned(&[NUMBER, MEMORY, CORES, PERCENTAGE, GPU_MEMORY, GPU_NUMBER]),
            annotations: owned(&[
                USE_TYPE,
                NO_USE_TYPE,
                USE_UUID,
                NO_USE_UUID,
                MODE,
                PODGROUP_POLICY,
            ]),
            written: owned(&[
                "volcano.sh/gpu-index",
                "volcano.sh/predicate-time",
                "volcano.sh/vgpu-time",
                "volcano.sh/vgpu-node",
                "volcano.sh/vgpu-ids-new",
                "volcano.sh/devices-to-allocate",
                "volcano.sh/bind-time",
                "volcano.sh/bind-phase",
            ]),
        }
    }

    fn check(&self) -> Result<(), SettingsError> {
        at_least_one(Dialect::Volcano, "memoryFactor", self.own.memory_factor)
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        let mut containers = Vec::new();
        let mut on_one_gpu = None;
        for (index, container) in pod.containers.iter().enumerate() {
            if container.kind != Kind::Regular {
                ignore(&self.names(), container, reader)?;
                continue;
            }
            let shares = vgpu_share(&self.own, container, reader)?;
            let older = older_share(container, reader)?;
            let memory_only = older.is_some_and(|(_, share)| share.memory != MemoryAsk::All);
            let share = match (shares, older) {
                (Some(_), Some(_)) => return Err(mixed(container, reader)),
                (shares, older) => shares.or(older),
            };
            let Some((gpus, share)) = share else { continue };
            match on_one_gpu {
                Some(others) if others != memory_only => return Err(mixed(container, reader)),
                _ => on_one_gpu = Some(memory_only),
            }
            set_limits(reader, index, gpus, share.memory);
            containers.push(ContainerAsk::of(index, gpus, share));
        }
        let mut ask = reader.pod_ask(containers);
        ask.one_gpu = on_one_gpu == Some(true);
        read_annotations(pod, reader, &mut ask)?;
        Ok(ask)
    }
}

fn ignore(
    names: &Names,
    container: &Container<'_>,
    reader: &mut Reader<'_>,
) -> Result<(), PodRefusal> {
    for name in &names.resources {
        if let Some(amount) = reader.amount(container, name)?.filter(|amount| *amount > 0) {
            let text = "init containers get no GPU there; ask for it in a regular container";
            reader.ignored_there(limit_path(container, name), amount.to_string(), text)?;
        }
    }
    Ok(())
}

fn mixed(container: &Container<'_>, reader: &Reader<'_>) -> PodRefusal {
    let problem = "gpu-memory places all containers of the pod on one GPU and excludes the other \
                   names; use vgpu-memory";
    reader.refusal(container.path("resources.limits"), GPU_MEMORY, problem)
}

fn vgpu_share(
    settings: &VolcanoSettings,
    container: &Container<'_>,
    reader: &mut Reader<'_>,
) -> Result<Option<(u64, ShareAsk)>, PodRefusal> {
    let amount = |name: &str| reader.amount(container, name);
    let (count, memory, cores) = (amount(NUMBER)?, amount(MEMORY)?, amount(CORES)?);
    let percentage = amount(PERCENTAGE)?;
    let percentage = if settings.memory_percentage {
        percentage
    } else {
        if let Some(ignored) = percentage {
            let text = "is not read there unless its ConfigMap names it (`memoryPercentage: true`)";
            reader.warn(limit_path(container, PERCENTAGE), ignored.to_string(), text);
        }
        None
    };
    let gpus = match (count, memory) {
        (Some(count), _) => count,
        (None, Some(_)) => 1,
        (None, None) => {
            for (name, amount) in [(CORES, cores), (PERCENTAGE, percentage)] {
                if let Some(amount) = amount {
                    let text = format!("gives no GPU without {NUMBER} or {MEMORY}");
                    reader.ignored_there(limit_path(container, name), amount.to_string(), &text)?;
                }
            }
            0
        }
    };
    if gpus == 0 {
        return Ok(None);
    }
    let cores = cores.unwrap_or(0);
    let Some(cores) = u8::try_from(cores).ok().filter(|cores| *cores <= 100) else {
        let problem = "never fits; expected a whole number from 0 to 100";
        return Err(reader.refusal(limit_path(container, CORES), cores, problem));
    };
    let exclusive = cores == 100;
    let memory = match (percentage, memory.unwrap_or(0)) {
        (Some(percentage @ 1..), _) => percent(percentage, exclusive, container, reader)?,
        (_, 0) => MemoryAsk::All,
        (_, units) => MemoryAsk::Mib(units.saturating_mul(settings.memory_factor)),
    };
    let share = ShareAsk { memory, cores, exclusive, ..ShareAsk::default() };
    Ok(Some((gpus, share.with_policy(Some(reader.compute_policy())))))
}

fn percent(
    percentage: u64,
    exclusive: bool,
    container: &Container<'_>,
    reader: &mut Reader<'_>,
) -> Result<MemoryAsk, PodRefusal> {
    let field = limit_path(container, PERCENTAGE);
    match MemoryPercent::from_hundredths(percentage.saturating_mul(100)) {
        None => Err(reader.refusal(field, percentage, "expected a whole number from 0 to 100")),
        Some(percent) if percent.hundredths() == 10_000 => Ok(MemoryAsk::All),
        Some(_) if exclusive => reader.all_memory(field, percentage),
        Some(percent) => Ok(MemoryAsk::Percent(percent)),
    }
}

fn older_share(
    container: &Container<'_>,
    reader: &Reader<'_>,
) -> Result<Option<(u64, ShareAsk)>, PodRefusal> {
    let positive = |name: &str| {
        let amount = reader.amount(container, name)?;
        Ok(amount.filter(|amount| *amount > 0))
    };
    match (positive(GPU_MEMORY)?, positive(GPU_NUMBER)?) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => Err(mixed(container, reader)),
        (Some(mib), None) => {
            Ok(Some((1, ShareAsk { memory: MemoryAsk::Mib(mib), ..ShareAsk::default() })))
        }
        (None, Some(gpus)) => Ok(Some((gpus, ShareAsk::whole()))),
    }
}

fn read_annotations(
    pod: &Pod<'_>,
    reader: &mut Reader<'_>,
    ask: &mut PodAsk,
) -> Result<(), PodRefusal> {
    let types = (Text::PrefixedType, Items::Verbatim);
    let lists = (USE_TYPE, NO_USE_TYPE);
    ask.selectors.extend(select_wanted_or_not(pod, reader, lists, types)?);
    ask.selectors.extend(select_uuids(pod, reader, USE_UUID, true)?);
    ask.selectors.extend(select_uuids(pod, reader, NO_USE_UUID, false)?);
    if let Some(mode) = pod.annotation(MODE).filter(|mode| *mode != "hami-core") {
        let text = "the mode of a GPU cannot be chosen; the claim shares by the interceptor";
        reader.inexpressible(annotation_path(MODE), mode, text)?;
    }
    if let Some(policy) = pod.annotation(PODGROUP_POLICY) {
        let text = "the pods of a PodGroup cannot be spread over GPUs; topologySpreadConstraints \
                    spread them over nodes";
        reader.inexpressible(annotation_path(PODGROUP_POLICY), policy, text)?;
    }
    Ok(())
}
