//! KAI and Run:ai: annotations `gpu-fraction` and `gpu-memory`.

use tessera_api::config::{ComputePolicy, MemoryPercent, Sharing};

use super::reader::{annotation_path, limit_path};
use super::{Defaults, Names, Read, Reader, Trigger, owned};
use crate::ask::{ContainerAsk, MemoryAsk, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::{Kind, Pod};
use crate::refusal::PodRefusal;
use crate::settings::{Common, Entry, KaiSettings};

const FRACTION: &str = "gpu-fraction";
const MEMORY: &str = "gpu-memory";
const DEVICES: &str = "gpu-fraction-num-devices";
const CONTAINER: &str = "gpu-fraction-container-name";
const MPS: &str = "mps";
const WHOLE: &str = "nvidia.com/gpu";

impl Read for Entry<KaiSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::Kai
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults {
            schedulers: &["kai-scheduler", "runai-scheduler"],
            opt_out: &[("kai-resource-isolator.io/webhook", "ignore")],
            ..Defaults::of(ComputePolicy::None)
        }
    }

    fn names(&self) -> Names {
        Names {
            resources: Vec::new(),
            annotations: owned(&[FRACTION, MEMORY, DEVICES, CONTAINER, MPS]),
            written: owned(&["runai/shared-gpu-configmap"]),
        }
    }

    fn triggers(&self) -> Vec<Trigger> {
        owned(&[FRACTION, MEMORY]).into_iter().map(Trigger::Annotation).collect()
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        if let Some(container) = pod.containers.iter().find(|container| container.names(WHOLE)) {
            let problem = format!("excludes the annotations {FRACTION} and {MEMORY}");
            let amount = reader.amount(container, WHOLE)?.unwrap_or_default();
            return Err(reader.refusal(limit_path(container, WHOLE), amount, problem));
        }
        let memory = memory(pod, reader)?;
        let gpus = devices(pod, reader)?;
        let container = container(pod, reader)?;
        let mut share = ShareAsk { memory, ..ShareAsk::default() };
        let is_mps = pod.annotation(MPS) == Some("true");
        if is_mps {
            share.cores = mps_cores(memory, gpus, reader)?;
            share.compute.policy = Some(ComputePolicy::Fixed);
        }
        if let MemoryAsk::Mib(mib) = memory {
            reader.set_env(container, "CUDA_DEVICE_MEMORY_LIMIT".to_owned(), format!("{mib}m"));
        }
        let mut ask = reader.pod_ask(vec![ContainerAsk::of(container, gpus, share)]);
        ask.sharing = is_mps.then_some(Sharing::Mps);
        Ok(ask)
    }
}

fn memory(pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<MemoryAsk, PodRefusal> {
    let (fraction, memory) = (pod.annotation(FRACTION), pod.annotation(MEMORY));
    match (fraction, memory) {
        (Some(fraction), Some(_)) => {
            let problem = format!("cannot be combined with the annotation {MEMORY}; use one");
            Err(reader.refusal(annotation_path(FRACTION), fraction, problem))
        }
        (Some(fraction), None) => percent(fraction, reader).map(MemoryAsk::Percent),
        (None, Some(text)) => {
            let mib = text.parse::<u64>().ok().filter(|mib| (1..1 << 31).contains(mib));
            mib.map(MemoryAsk::Mib).ok_or_else(|| {
                let problem = "expected a whole number of MiB greater than 0";
                reader.refusal(annotation_path(MEMORY), text, problem)
            })
        }
        // A trigger is one of the two.
        (None, None) => Ok(MemoryAsk::All),
    }
}

/// Returns the fraction as a percentage, rounded down to two decimals.
fn percent(text: &str, reader: &mut Reader<'_>) -> Result<MemoryPercent, PodRefusal> {
    let fraction = text.parse::<f64>().ok().filter(|fraction| *fraction > 0.0 && *fraction < 1.0);
    let refusal = |problem| reader.refusal(annotation_path(FRACTION), text, problem);
    let Some(fraction) = fraction else {
        return Err(refusal("expected a number greater than 0 and smaller than 1"));
    };
    // 0.29 is a little less than 29 hundredths in binary; the smallest step that is added is far
    // below a hundredth of a percent.
    let hundredths = (fraction * 10_000.0 + 1e-6).floor();
    let percent = MemoryPercent::from_hundredths(hundredths as u64);
    let percent = percent.ok_or_else(|| refusal("expected at least 0.0001"))?;
    if (hundredths - fraction * 10_000.0).abs() > 1e-6 {
        let text_of = format!("rounded down to {percent} of the memory");
        reader.warn(annotation_path(FRACTION), text, &text_of);
    }
    Ok(percent)
}

fn devices(pod: &Pod<'_>, reader: &Reader<'_>) -> Result<u64, PodRefusal> {
    let Some(text) = pod.annotation(DEVICES) else { return Ok(1) };
    let devices = text.parse::<u64>().ok().filter(|devices| *devices > 0);
    devices.ok_or_else(|| {
        let problem = "expected a whole number greater than 0";
        reader.refusal(annotation_path(DEVICES), text, problem)
    })
}

/// Returns the container that gets the GPU: the named one, or the first regular one.
fn container(pod: &Pod<'_>, reader: &Reader<'_>) -> Result<usize, PodRefusal> {
    let Some(name) = pod.annotation(CONTAINER) else {
        let mut containers = pod.containers.iter();
        let first = containers.position(|container| container.kind == Kind::Regular);
        return first
            .ok_or_else(|| reader.refusal("spec.containers", "[]", "pod has no containers"));
    };
    pod.containers.iter().position(|container| container.name == name).ok_or_else(|| {
        let names: Vec<_> = pod.containers.iter().map(|container| container.name).collect();
        let problem = format!("is no container of the pod: {}", names.join(", "));
        reader.refusal(annotation_path(CONTAINER), name, problem)
    })
}

fn mps_cores(memory: MemoryAsk, gpus: u64, reader: &Reader<'_>) -> Result<u8, PodRefusal> {
    let field = annotation_path(MPS);
    match memory {
        MemoryAsk::Percent(percent) if gpus == 1 => {
            Ok(u8::try_from(percent.hundredths() / 100).unwrap_or(100))
        }
        MemoryAsk::Percent(_) => {
            let problem = format!("needs one GPU; {DEVICES} asks for {gpus}");
            Err(reader.refusal(field, "true", problem))
        }
        MemoryAsk::All | MemoryAsk::Mib(_) => {
            let problem = format!("MPS is only supported with the annotation {FRACTION}");
            Err(reader.refusal(field, "true", problem))
        }
    }
}
