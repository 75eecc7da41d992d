//! AWS virtual GPUs: `k8s.amazonaws.com/vgpu`.

use tessera_api::config::{ComputePolicy, Sharing};

use super::reader::limit_path;
use super::slots::{Slots, gpus};
use super::{Defaults, Names, Read, Reader, at_least_one};
use crate::ask::{ContainerAsk, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::Pod;
use crate::refusal::PodRefusal;
use crate::settings::{AwsSettings, Common, Entry, SettingsError};

const NODE_LABEL: &str = "k8s.amazonaws.com/accelerator";

impl Read for Entry<AwsSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::Aws
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults::of(ComputePolicy::Balance)
    }

    fn names(&self) -> Names {
        Names { resources: vec![self.own.resource_name.clone()], ..Names::default() }
    }

    fn check(&self) -> Result<(), SettingsError> {
        at_least_one(Dialect::Aws, "vgpus", self.own.vgpus)
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        let AwsSettings { resource_name, vgpus, mps } = &self.own;
        let policy = if *mps { ComputePolicy::Fixed } else { reader.compute_policy() };
        let mut containers = Vec::new();
        for (index, container) in pod.containers.iter().enumerate() {
            let slots = reader.amount(container, resource_name)?.unwrap_or(0);
            if slots == 0 {
                continue;
            }
            let (gpus, share) = match gpus(slots, *vgpus) {
                Slots::Part(share) => (1, share),
                Slots::Whole(gpus) => (gpus, ShareAsk { cores: 100, ..ShareAsk::whole() }),
                Slots::Uneven => {
                    let field = limit_path(container, resource_name);
                    let problem = format!(
                        "expected less than {vgpus}, the virtual GPUs of a GPU, or a multiple of it"
                    );
                    return Err(reader.refusal(field, slots, problem));
                }
            };
            containers.push(ContainerAsk::of(index, gpus, share.with_policy(Some(policy))));
        }
        if !containers.is_empty() {
            warn_of_leftovers(pod, reader);
        }
        let shares_a_gpu = containers.iter().any(|ask| ask.groups[0].share.cores < 100);
        let mut ask = reader.pod_ask(containers);
        ask.sharing = (*mps && shares_a_gpu).then_some(Sharing::Mps);
        Ok(ask)
    }
}

fn warn_of_leftovers(pod: &Pod<'_>, reader: &mut Reader<'_>) {
    if pod.uses_host_ipc() {
        let text = "is not needed any more, and the Pod Security Standard `baseline` forbids it";
        reader.warn("spec.hostIPC", "true", text);
    }
    if let Some(value) = pod.node_selector(NODE_LABEL) {
        let text = "is kept: the pod runs on nodes with this label only";
        reader.warn(format!("spec.nodeSelector[{NODE_LABEL}]"), value, text);
    }
}
