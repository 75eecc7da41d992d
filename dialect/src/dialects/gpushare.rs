//! Aliyun gpushare: `aliyun.com/gpu-mem`, all containers of a pod on one GPU.

use tessera_api::config::ComputePolicy;

use super::reader::limit_path;
use super::{Defaults, Names, Read, Reader, owned};
use crate::ask::{ContainerAsk, MemoryAsk, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::Pod;
use crate::refusal::PodRefusal;
use crate::settings::{Common, Entry, GpushareSettings, MemoryUnit};

const MEMORY: &str = "aliyun.com/gpu-mem";
const COUNT: &str = "aliyun.com/gpu-count";

impl Read for Entry<GpushareSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::Gpushare
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults::of(ComputePolicy::None)
    }

    fn names(&self) -> Names {
        Names {
            resources: owned(&[MEMORY, COUNT]),
            annotations: Vec::new(),
            written: owned(&[
                "ALIYUN_COM_GPU_MEM_IDX",
                "ALIYUN_COM_GPU_MEM_POD",
                "ALIYUN_COM_GPU_MEM_DEV",
                "ALIYUN_COM_GPU_MEM_ASSIGNED",
                "ALIYUN_COM_GPU_MEM_ASSUME_TIME",
            ]),
        }
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        let mib_per_unit = match self.own.memory_unit {
            MemoryUnit::GiB => 1024,
            MemoryUnit::MiB => 1,
        };
        let mut amounts = Vec::new();
        for (index, container) in pod.containers.iter().enumerate() {
            if let Some(count) = reader.amount(container, COUNT)?.filter(|count| *count > 0) {
                let problem =
                    format!("is the number of GPUs of a node, and gives none; use {MEMORY}");
                return Err(reader.refusal(limit_path(container, COUNT), count, problem));
            }
            let amount = reader.amount(container, MEMORY)?.filter(|amount| *amount > 0);
            amounts.extend(amount.map(|units| (index, units)));
        }
        let total: u64 = amounts.iter().map(|(_, units)| units).sum();
        let ask = |&(index, units): &(usize, u64)| {
            // The GPU shows the container's limit as its memory, so that the container has all of
            // it.
            for (name, value) in [
                ("ALIYUN_COM_GPU_MEM_CONTAINER", units),
                ("ALIYUN_COM_GPU_MEM_DEV", units),
                ("ALIYUN_COM_GPU_MEM_POD", total),
                ("ALIYUN_COM_GPU_MEM_IDX", 0),
            ] {
                reader.set_env(index, name.to_owned(), value.to_string());
            }
            let memory = MemoryAsk::Mib(units * mib_per_unit);
            ContainerAsk::of(index, 1, ShareAsk { memory, ..ShareAsk::default() })
        };
        let containers = amounts.iter().map(ask).collect();
        Ok(PodAsk { one_gpu: true, ..reader.pod_ask(containers) })
    }
}
