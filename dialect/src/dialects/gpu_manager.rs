//! tkestack's gpu-manager: `tencent.com/vcuda-core` and `vcuda-memory`.

use tessera_api::config::{ComputePolicy, Percent};

use super::reader::{annotation_path, limit_path};
use super::{Defaults, Names, Read, Reader, owned};
use crate::ask::{ContainerAsk, MemoryAsk, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::{Container, Pod};
use crate::refusal::PodRefusal;
use crate::settings::{Common, Entry, GpuManagerSettings};

const CORE: &str = "tencent.com/vcuda-core";
const MEMORY: &str = "tencent.com/vcuda-memory";
const CORE_LIMIT: &str = "tencent.com/vcuda-core-limit";
/// MiB of a unit of memory.
const BLOCK_MIB: u64 = 256;

impl Read for Entry<GpuManagerSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::GpuManager
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults::of(ComputePolicy::Fixed)
    }

    fn names(&self) -> Names {
        Names {
            resources: owned(&[CORE, MEMORY]),
            annotations: owned(&[CORE_LIMIT]),
            written: owned(&[
                "tencent.com/gpu-assigned",
                "tencent.com/vcuda-device",
                "tencent.com/predicate-time",
                "tencent.com/predicate-node",
            ]),
        }
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        let limit = core_limit(pod, reader)?;
        let mut containers = Vec::new();
        for (index, container) in pod.containers.iter().enumerate() {
            let Some((gpus, mut share)) = container_share(container, reader)? else { continue };
            share = share.with_policy(Some(reader.compute_policy()));
            if let Some(limit) = limit.filter(|_| (1..100).contains(&share.cores)) {
                if limit.get() < share.cores {
                    let problem =
                        format!("expected at least {CORE}, {}, and at most 100", share.cores);
                    let field = annotation_path(CORE_LIMIT);
                    return Err(reader.refusal(field, limit.get(), problem));
                }
                share.compute.policy = Some(ComputePolicy::Balance);
                share.compute.limit = Some(limit);
            }
            containers.push(ContainerAsk::of(index, gpus, share));
        }
        Ok(reader.pod_ask(containers))
    }
}

fn core_limit(pod: &Pod<'_>, reader: &Reader<'_>) -> Result<Option<Percent>, PodRefusal> {
    let Some(text) = pod.annotation(CORE_LIMIT) else { return Ok(None) };
    let limit = text.parse::<u64>().ok().and_then(Percent::new);
    let refusal = || {
        reader.refusal(annotation_path(CORE_LIMIT), text, "expected a whole number from 1 to 100")
    };
    limit.map(Some).ok_or_else(refusal)
}

fn container_share(
    container: &Container<'_>,
    reader: &Reader<'_>,
) -> Result<Option<(u64, ShareAsk)>, PodRefusal> {
    let core = reader.amount(container, CORE)?.unwrap_or(0);
    let blocks = reader.amount(container, MEMORY)?.unwrap_or(0);
    let refuse = |name: &str, amount: u64, problem: &str| {
        Err(reader.refusal(limit_path(container, name), amount, problem))
    };
    match (core, blocks) {
        (0, 0) => Ok(None),
        (100.., _) if !core.is_multiple_of(100) => {
            refuse(CORE, core, "cores are greater than 100, must be multiple of 100")
        }
        (100.., _) => Ok(Some((core / 100, ShareAsk { cores: 100, ..ShareAsk::whole() }))),
        (0, _) | (_, 0) => {
            let (name, amount) = if core == 0 { (MEMORY, blocks) } else { (CORE, core) };
            refuse(name, amount, "that cores or memory is zero is not permitted in share mode")
        }
        (1..100, _) => {
            let memory = MemoryAsk::Mib(blocks.saturating_mul(BLOCK_MIB));
            let cores = u8::try_from(core).unwrap_or(100);
            Ok(Some((1, ShareAsk { memory, cores, ..ShareAsk::default() })))
        }
    }
}
