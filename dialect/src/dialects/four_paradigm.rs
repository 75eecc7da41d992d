//! 4paradigm's k8s-vgpu-scheduler: the names of HAMi, read otherwise.

use tessera_api::config::{ComputePolicy, MemoryPercent};

use super::hami::{NO_USE_TYPE, NUMA_BIND, USE_TYPE, container_asks, numa_bind, priority};
use super::reader::limit_path;
use super::types::{Items, select_wanted_or_not};
use super::{Defaults, Names, Read, Reader, Unlimited, owned};
use crate::ask::{MemoryAsk, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::{Container, Pod};
use crate::refusal::PodRefusal;
use crate::selector::Text;
use crate::settings::{Common, Entry, FourParadigmSettings};

impl Read for Entry<FourParadigmSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::FourParadigm
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            replaced_schedulers: &["4pd-scheduler"],
            opt_out: &[("4pd.io/webhook", "ignore")],
            unlimited: Some(Unlimited { variable: "CUDA_DISABLE_CONTROL", any_value: true }),
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
            annotations: owned(&[USE_TYPE, NO_USE_TYPE, NUMA_BIND]),
            written: owned(&[
                "4pd.io/vgpu-time",
                "4pd.io/vgpu-node",
                "4pd.io/vgpu-ids-new",
                "4pd.io/devices-to-allocate",
                "4pd.io/bind-time",
                "4pd.io/bind-phase",
                "hami.sh/vgpu-devices-to-allocate",
                "hami.sh/vgpu-devices-allocated",
            ]),
        }
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        let share = |c: &Container<'_>, r: &mut Reader<'_>| container_share(&self.own, c, r);
        let containers = container_asks(pod, reader, share)?;
        let mut ask = reader.pod_ask(containers);
        // An empty item is a part of every type there.
        let types = (Text::AlwaysPrefixedType, Items::Verbatim);
        let lists = (USE_TYPE, NO_USE_TYPE);
        ask.selectors.extend(select_wanted_or_not(pod, reader, lists, types)?);
        ask.topology.extend(numa_bind(pod, reader));
        Ok(ask)
    }
}

fn container_share(
    settings: &FourParadigmSettings,
    container: &Container<'_>,
    reader: &mut Reader<'_>,
) -> Result<Option<(u64, ShareAsk)>, PodRefusal> {
    let amount = |name: &str| reader.amount(container, name);
    let count = amount(&settings.resource_name)?;
    let memory = amount(&settings.resource_mem)?;
    let percentage = amount(&settings.resource_mem_percentage)?;
    let cores = amount(&settings.resource_cores)?;
    let priority = priority(reader, container, &settings.resource_priority)?;
    let field = |name: &str| limit_path(container, name);
    let Some(gpus) = count else {
        let parts = [
            (&settings.resource_mem, memory),
            (&settings.resource_mem_percentage, percentage),
            (&settings.resource_cores, cores),
        ];
        if let Some((name, Some(amount))) = parts.into_iter().find(|(_, amount)| amount.is_some()) {
            let text = format!("gives no GPU without {}; set {0}: 1", settings.resource_name);
            reader.ignored_there(field(name), amount.to_string(), &text)?;
        }
        return Ok(None);
    };
    if gpus == 0 {
        return Ok(None);
    }
    let cores = cores.unwrap_or(0);
    if cores > 100 {
        let problem = "never fits; expected a whole number from 0 to 100";
        return Err(reader.refusal(field(&settings.resource_cores), cores, problem));
    }
    let memory = match (memory.unwrap_or(0), percentage) {
        (0, None | Some(100)) => MemoryAsk::All,
        (0, Some(percentage)) => {
            let percent = MemoryPercent::from_hundredths(percentage.saturating_mul(100));
            let problem = "expected a whole number from 1 to 100";
            let name = field(&settings.resource_mem_percentage);
            MemoryAsk::Percent(percent.ok_or_else(|| reader.refusal(name, percentage, problem))?)
        }
        (mib, _) => MemoryAsk::Mib(mib),
    };
    let cores = u8::try_from(cores).unwrap_or(100);
    let share = ShareAsk { memory, cores, ..ShareAsk::default() };
    let mut share = share.with_policy(Some(reader.compute_policy()));
    share.compute.priority = priority;
    Ok(Some((gpus, share)))
}
