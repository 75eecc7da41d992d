//! elastic-gpu-scheduler: `gpu-core` and `gpu-memory` of three domains.

use tessera_api::config::{ComputePolicy, MemoryPercent};

use super::reader::limit_path;
use super::{Defaults, Names, Read, Reader, owned};
use crate::ask::{ContainerAsk, MemoryAsk, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::{Container, Kind, Pod};
use crate::refusal::PodRefusal;
use crate::settings::{Common, ElasticSettings, Entry};

/// Resources for compute and memory. The domain depends on the component that a cluster runs.
const RESOURCES: [(&str, &str); 3] = [
    ("elasticgpu.io/gpu-core", "elasticgpu.io/gpu-memory"),
    ("elasticgpu.com/gpu-core", "elasticgpu.com/gpu-memory"),
    (
        "gpushare.provisioner.elasticgpu.io/gpu-core",
        "gpushare.provisioner.elasticgpu.io/gpu-memory",
    ),
];

impl Read for Entry<ElasticSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::Elastic
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults::of(ComputePolicy::None)
    }

    fn names(&self) -> Names {
        let resources = RESOURCES.iter().flat_map(|(core, memory)| owned(&[core, memory]));
        Names {
            resources: resources.collect(),
            annotations: Vec::new(),
            written: owned(&["elasticgpu.io/assumed"]),
        }
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        let mut containers = Vec::new();
        for (index, container) in pod.containers.iter().enumerate() {
            let Some(asked) = named(container, reader)? else { continue };
            if container.kind != Kind::Regular {
                let text = "init containers get no GPU there; ask for it in a regular container";
                let field = limit_path(container, asked.name);
                reader.ignored_there(field, asked.amount().to_string(), text)?;
                continue;
            }
            let (gpus, share) = asked.share(container, reader);
            containers.push(ContainerAsk::of(index, gpus, share));
        }
        Ok(reader.pod_ask(containers))
    }
}

/// Amounts of one container.
struct Asked {
    /// The resource for compute, or the one for memory if there is no compute.
    name: &'static str,
    core: u64,
    memory: u64,
}

fn named(container: &Container<'_>, reader: &Reader<'_>) -> Result<Option<Asked>, PodRefusal> {
    let mut found: Option<Asked> = None;
    for (core_name, memory_name) in RESOURCES {
        let core = reader.amount(container, core_name)?.unwrap_or(0);
        let memory = reader.amount(container, memory_name)?.unwrap_or(0);
        if core == 0 && memory == 0 {
            continue;
        }
        let name = if core > 0 { core_name } else { memory_name };
        if let Some(other) = found {
            let problem = format!("cannot be combined with {} in one container", other.name);
            return Err(reader.refusal(limit_path(container, name), core.max(memory), problem));
        }
        found = Some(Asked { name, core, memory });
    }
    Ok(found)
}

impl Asked {
    fn amount(&self) -> u64 {
        if self.core > 0 { self.core } else { self.memory }
    }

    fn share(&self, container: &Container<'_>, reader: &mut Reader<'_>) -> (u64, ShareAsk) {
        let Self { name, core, memory } = *self;
        let gpus = core / 100;
        if gpus > 0 {
            if !core.is_multiple_of(100) {
                let text = format!("rounded down to {gpus} whole GPUs, as there");
                reader.warn(limit_path(container, name), core.to_string(), &text);
            }
            return (gpus, ShareAsk { cores: 100, ..ShareAsk::whole() });
        }
        let memory = match memory {
            // Memory that is not named is not unlimited: as much of it as of the compute.
            0 => MemoryPercent::from_hundredths(core * 100)
                .map_or(MemoryAsk::All, MemoryAsk::Percent),
            mib => MemoryAsk::Mib(mib),
        };
        let cores = u8::try_from(core).unwrap_or(100);
        let share = ShareAsk { memory, cores, ..ShareAsk::default() };
        (1, share.with_policy(Some(reader.compute_policy())))
    }
}
