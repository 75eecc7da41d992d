//! NVIDIA's device plugin (whole GPUs, time slicing, MPS, MIG) and GKE's.

use tessera_api::config::{ComputePolicy, Sharing};
use tessera_api::names::{CLASS_RESOURCE_PREFIX, DeviceClassName};

use super::mig;
use super::reader::limit_path;
use super::slots::{Slots, gpus};
use super::{Defaults, Names, Read, Reader, at_least_one};
use crate::ask::{ContainerAsk, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::{Container, Pod};
use crate::refusal::PodRefusal;
use crate::settings::{Common, Entry, NvidiaResource, NvidiaSettings, SettingsError, SlotSharing};

const GKE_CLIENTS: &str = "cloud.google.com/gke-max-shared-clients-per-gpu";
const GKE_STRATEGY: &str = "cloud.google.com/gke-gpu-sharing-strategy";
const GKE_PARTITION: &str = "cloud.google.com/gke-gpu-partition-size";

impl Read for Entry<NvidiaSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::Nvidia
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults::of(ComputePolicy::None)
    }

    fn names(&self) -> Names {
        let resources = self.own.resources.iter().map(|resource| resource.name.clone()).collect();
        Names { resources, ..Names::default() }
    }

    fn check(&self) -> Result<(), SettingsError> {
        for resource in &self.own.resources {
            check_mig(resource)?;
            at_least_one(Dialect::Nvidia, "resources[].replicas", resource.replicas)?;
            if let Some(class) = class(resource)
                && DeviceClassName::new(class).is_err()
            {
                return Err(SettingsError::Value {
                    dialect: Dialect::Nvidia,
                    field: "resources[].deviceClass",
                    value: class.to_owned(),
                    allowed: DeviceClassName::RULE,
                });
            }
        }
        Ok(())
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        let gke = self.own.gke.then(|| gke_sharing(pod, reader)).transpose()?.flatten();
        let partition = self.own.gke.then(|| gke_partition(pod, reader)).transpose()?.flatten();
        let mut containers = Vec::new();
        let mut by_mps = false;
        for (index, container) in pod.containers.iter().enumerate() {
            let Some((resource, slots)) = named(&self.own, container, reader)? else { continue };
            if let Some(profile) = mig_profile(resource, partition) {
                containers.push(ContainerAsk::of_mig(index, slots, profile));
                continue;
            }
            let (per_gpu, sharing) = gke.unwrap_or((resource.replicas, resource.sharing));
            if gke.is_some() && slots > 1 && sharing == SlotSharing::TimeSlicing {
                let problem = "invalid request for sharing GPU (time-sharing), at most 1 can be \
                               requested on GPU nodes";
                return Err(reader.refusal(limit_path(container, &resource.name), slots, problem));
            }
            let (gpus, share) = match gpus(slots, per_gpu) {
                Slots::Whole(gpus) => (gpus, ShareAsk::whole()),
                Slots::Part(share) if sharing == SlotSharing::Mps => {
                    by_mps = true;
                    (1, share.with_policy(Some(ComputePolicy::Fixed)))
                }
                Slots::Part(share) => (1, share.with_policy(Some(reader.compute_policy()))),
                Slots::Uneven => {
                    let problem = format!(
                        "expected less than {per_gpu}, the slots of a GPU, or a multiple of it"
                    );
                    let field = limit_path(container, &resource.name);
                    return Err(reader.refusal(field, slots, problem));
                }
            };
            containers.push(ContainerAsk::of(index, gpus, share).of_class(class(resource)));
        }
        let mut ask = reader.pod_ask(containers);
        ask.sharing = by_mps.then_some(Sharing::Mps);
        Ok(ask)
    }
}

/// Returns the DeviceClass of a resource; `None` for that of the settings.
fn class(resource: &NvidiaResource) -> Option<&str> {
    resource.device_class.as_deref().or_else(|| resource.name.strip_prefix(CLASS_RESOURCE_PREFIX))
}

/// Returns the profile of the MIG devices that the resource is, by its name or by GKE's node label;
/// `None` for GPUs, and for a resource with a DeviceClass of its own, which selects the devices.
fn mig_profile(resource: &NvidiaResource, partition: Option<&str>) -> Option<String> {
    if resource.device_class.is_some() {
        return None;
    }
    mig::profile_of_resource(&resource.name).or_else(|| partition.map(str::to_owned))
}

fn check_mig(resource: &NvidiaResource) -> Result<(), SettingsError> {
    if !mig::is_resource(&resource.name) {
        return Ok(());
    }
    let refused = |field, value: &dyn ToString, allowed| {
        let (dialect, value) = (Dialect::Nvidia, value.to_string());
        Err(SettingsError::Value { dialect, field, value, allowed })
    };
    if resource.replicas != 1 {
        let allowed = "expected 1: a MIG device is not shared";
        return refused("resources[].replicas", &resource.replicas, allowed);
    }
    if resource.device_class.is_none() && mig_profile(resource, None).is_none() {
        let allowed = "expected a profile of a GPU instance, such as nvidia.com/mig-1g.10gb, or a \
                       deviceClass beside the name";
        return refused("resources[].name", &resource.name, allowed);
    }
    Ok(())
}

/// Returns the resource that the container asks for, and the amount; `None` for none.
fn named<'s>(
    settings: &'s NvidiaSettings,
    container: &Container<'_>,
    reader: &Reader<'_>,
) -> Result<Option<(&'s NvidiaResource, u64)>, PodRefusal> {
    let mut found: Option<(&NvidiaResource, u64)> = None;
    for resource in &settings.resources {
        let amount = reader.amount(container, &resource.name)?.filter(|amount| *amount > 0);
        let Some(amount) = amount else { continue };
        if let Some((other, _)) = found {
            let problem = format!("cannot be combined with {} in one container", other.name);
            return Err(reader.refusal(limit_path(container, &resource.name), amount, problem));
        }
        found = Some((resource, amount));
    }
    Ok(found)
}

/// Returns the slots per GPU and the sharing that the node selector names; `None` for whole GPUs.
fn gke_sharing(
    pod: &Pod<'_>,
    reader: &Reader<'_>,
) -> Result<Option<(u64, SlotSharing)>, PodRefusal> {
    let Some(clients) = pod.node_selector(GKE_CLIENTS) else { return Ok(None) };
    let field = |label: &str| format!("spec.nodeSelector[{label}]");
    let per_gpu = clients.parse::<u64>().ok().filter(|clients| (1..=48).contains(clients));
    let per_gpu = per_gpu.ok_or_else(|| {
        reader.refusal(field(GKE_CLIENTS), clients, "expected a whole number from 1 to 48")
    })?;
    let sharing = match pod.node_selector(GKE_STRATEGY) {
        None | Some("time-sharing") => SlotSharing::TimeSlicing,
        Some("mps") => SlotSharing::Mps,
        Some(other) => {
            return Err(reader.refusal(field(GKE_STRATEGY), other, "expected time-sharing or mps"));
        }
    };
    Ok(Some((per_gpu, sharing)))
}

/// Returns the profile of the MIG devices that the node selector names; `None` for whole GPUs.
fn gke_partition<'p>(pod: &Pod<'p>, reader: &Reader<'_>) -> Result<Option<&'p str>, PodRefusal> {
    let Some(profile) = pod.node_selector(GKE_PARTITION) else { return Ok(None) };
    let field = || format!("spec.nodeSelector[{GKE_PARTITION}]");
    if !mig::is_profile(profile) {
        let problem = "expected a profile of a GPU instance, such as 1g.5gb";
        return Err(reader.refusal(field(), profile, problem));
    }
    if pod.node_selector(GKE_CLIENTS).is_some() {
        let problem = format!("a MIG device is not shared: cannot be combined with {GKE_CLIENTS}");
        return Err(reader.refusal(field(), profile, problem));
    }
    Ok(Some(profile))
}
