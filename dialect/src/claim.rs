//! The claim of a pod: one request per container, in a template named by its content.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tessera_api::GpuConfig;
use tessera_api::config::{Memory as ConfigMemory, Sharing, TopologyTerm};
use tessera_api::names::attribute::{NVLINK_CLIQUE, UUID};
use tessera_api::names::capacity::{CORES, MEMORY};
use tessera_api::names::{DRIVER_NAME, RequestName};
use tessera_api::quantity::Quantity;

use crate::ask::{ContainerAsk, Group, MemoryAsk, PodAsk};
use crate::dialects::Reader;
use crate::name::Dialect;
use crate::pod::{Kind, Pod};
use crate::refusal::PodRefusal;
use crate::selector::is_mig_profile;

/// Beginning of the names of templates that the controller makes for converted pods.
pub const TEMPLATE_PREFIX: &str = "tessera.";

/// Most requests of a claim (`DeviceRequestsMaxSize` of `resource.k8s.io/v1`).
const MAX_REQUESTS: usize = 32;
/// Most devices of an allocation (`AllocationResultsMaxSize`).
pub(crate) const MAX_DEVICES: u64 = 32;
/// Most characters of a request's name, a DNS label.
const MAX_NAME: usize = 63;

/// A ResourceClaimTemplate, named by its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    /// Name: [`TEMPLATE_PREFIX`], the dialect, and the first 80 bits of the content's SHA-256.
    pub name: String,
    /// `spec` of the ResourceClaimTemplate.
    pub spec: Value,
}

/// The requests of a claim, and those that each container uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Requests {
    requests: Vec<Request>,
    /// Names of requests by container.
    pub(crate) of_container: BTreeMap<usize, Vec<String>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Request {
    name: String,
    group: Group,
}

impl Requests {
    /// Assigns requests to containers: one of its own to each, but an init container uses that of a
    /// regular container that covers its ask, since the GPUs of a claim are reserved for the life
    /// of the pod.
    ///
    /// # Errors
    /// [`PodRefusal`] if there are more requests or GPUs than a claim has, or several by MPS.
    pub(crate) fn of(
        ask: &PodAsk,
        pod: &Pod<'_>,
        reader: &mut Reader<'_>,
    ) -> Result<Self, PodRefusal> {
        let mut requests = Self { requests: Vec::new(), of_container: BTreeMap::new() };
        let is_init = |ask: &&ContainerAsk| pod.containers[ask.container].kind == Kind::Init;
        let lasting: Vec<_> = ask.containers.iter().filter(|ask| !is_init(ask)).collect();
        for own in &lasting {
            requests.add(own, pod);
        }
        // Also bounds the comparisons below: a pod has as many containers as fit into an object.
        requests.check(ask, reader)?;
        for own in ask.containers.iter().filter(is_init) {
            if let Some(other) = lasting.iter().find(|other| other.covers(own)) {
                let shared = requests.of_container[&other.container].clone();
                requests.of_container.insert(own.container, shared);
                continue;
            }
            let container = &pod.containers[own.container];
            let text = "no regular container asks for as much, so that the init container's GPUs \
                        are reserved for the life of the pod";
            reader.warn(container.path("resources"), container.name, text);
            requests.add(own, pod);
        }
        requests.check(ask, reader)?;
        Ok(requests)
    }

    fn add(&mut self, ask: &ContainerAsk, pod: &Pod<'_>) {
        let container = pod.containers[ask.container].name;
        // One more than allowed is enough for the refusal.
        let room = (MAX_REQUESTS + 1).saturating_sub(self.requests.len());
        let names = ask.groups.iter().enumerate().take(room).map(|(index, group)| {
            let name = match ask.groups.len() {
                1 => self.free_name(container),
                _ => self.free_name(&format!("{container}-{index}")),
            };
            self.requests.push(Request { name: name.clone(), group: group.clone() });
            name
        });
        let names = names.collect();
        self.of_container.insert(ask.container, names);
    }

    /// Returns the name, or one made from it that no request has.
    fn free_name(&self, wanted: &str) -> String {
        let is_free = |name: &str| {
            RequestName::new(name).is_ok() && !self.requests.iter().any(|r| r.name == name)
        };
        if wanted.len() <= MAX_NAME && is_free(wanted) {
            return wanted.to_owned();
        }
        let numbered = (1..=self.requests.len() + 1).map(|number| {
            let suffix = format!("-{number}");
            let end = wanted.floor_char_boundary(MAX_NAME - suffix.len());
            format!("{}{suffix}", &wanted[..end.min(wanted.len())])
        });
        numbered.into_iter().find(|name| is_free(name)).unwrap_or_else(|| wanted.to_owned())
    }

    fn check(&self, ask: &PodAsk, reader: &Reader<'_>) -> Result<(), PodRefusal> {
        let count = self.requests.len();
        if count > MAX_REQUESTS {
            let problem = format!("a claim has at most {MAX_REQUESTS} requests, one per container");
            let value = format!("more than {MAX_REQUESTS} with GPUs");
            return Err(reader.refusal("spec.containers", value, problem));
        }
        let gpus = self.requests.iter().fold(0, |sum: u64, r| sum.saturating_add(r.group.gpus));
        if gpus > MAX_DEVICES {
            let problem = format!("a claim has at most {MAX_DEVICES} GPUs");
            return Err(reader.refusal("spec.containers", format!("{gpus} GPUs"), problem));
        }
        if ask.sharing == Some(Sharing::Mps) && gpus > 1 {
            let problem = "a process connects to one MPS daemon, and a claim that shares by MPS has \
                           one GPU for one container; share by the interceptor in the settings of \
                           the dialect";
            return Err(reader.refusal("spec.containers", format!("{gpus} GPUs"), problem));
        }
        Ok(())
    }
}

impl Template {
    /// Returns the template of a pod's claim.
    pub(crate) fn new(dialect: Dialect, class: &str, ask: &PodAsk, requests: &Requests) -> Self {
        let mut devices = json!({"requests": device_requests(class, ask, requests)});
        let constraints = constraints(ask, requests);
        if !constraints.is_empty() {
            devices["constraints"] = constraints.into();
        }
        let config = configs(ask, requests);
        if !config.is_empty() {
            devices["config"] = config.into();
        }
        let spec = json!({"spec": {"devices": devices}});
        let name = format!("{TEMPLATE_PREFIX}{dialect}.{}", content_hash(&spec));
        Self { name, spec }
    }
}

fn device_requests(class: &str, ask: &PodAsk, requests: &Requests) -> Vec<Value> {
    let selector = |expression: &String| json!({"cel": {"expression": expression}});
    let request = |request: &Request| {
        let class = request.group.class.as_deref().unwrap_or(class);
        let mut exactly = json!({"deviceClassName": class});
        if request.group.gpus != 1 {
            exactly["count"] = request.group.gpus.into();
        }
        let profile = request.group.mig_profile.as_deref().map(is_mig_profile);
        let selectors: Vec<_> = ask.selectors.iter().chain(&profile).map(selector).collect();
        if !selectors.is_empty() {
            exactly["selectors"] = selectors.into();
        }
        let amounts = amounts(&request.group);
        if !amounts.is_empty() {
            exactly["capacity"] = json!({"requests": amounts});
        }
        json!({"name": request.name, "exactly": exactly})
    };
    requests.requests.iter().map(request).collect()
}

/// Returns the amounts of a request; none of an exclusive one, which reserves all.
fn amounts(group: &Group) -> BTreeMap<&'static str, String> {
    let share = &group.share;
    let mut amounts = BTreeMap::new();
    if share.exclusive {
        return amounts;
    }
    if let MemoryAsk::Mib(mib) = share.memory {
        amounts.insert(MEMORY, Quantity::from_mib(mib).to_string());
    }
    if share.cores > 0 {
        amounts.insert(CORES, share.cores.to_string());
    }
    amounts
}

fn constraints(ask: &PodAsk, requests: &Requests) -> Vec<Value> {
    let qualified = |attribute: &str| format!("{DRIVER_NAME}/{attribute}");
    let mut constraints = Vec::new();
    for request in &requests.requests {
        let names = [&request.name];
        // A MIG device is allocated once, and has no UUID before it exists.
        if request.group.gpus > 1 && request.group.mig_profile.is_none() {
            let different = json!({"requests": names, "distinctAttribute": qualified(UUID)});
            constraints.push(different);
        }
        if request.group.one_clique {
            let linked = json!({"requests": names, "matchAttribute": qualified(NVLINK_CLIQUE)});
            constraints.push(linked);
        }
    }
    if ask.one_gpu && requests.requests.len() > 1 {
        let names: Vec<_> = requests.requests.iter().map(|request| &request.name).collect();
        constraints.push(json!({"requests": names, "matchAttribute": qualified(UUID)}));
    }
    constraints
}

/// Returns one configuration for each set of requests with equal parameters.
fn configs(ask: &PodAsk, requests: &Requests) -> Vec<Value> {
    let mut sets: Vec<(GpuConfig, Vec<&str>)> = Vec::new();
    for request in &requests.requests {
        let config = gpu_config(ask, &request.group);
        match sets.iter_mut().find(|(other, _)| *other == config) {
            Some((_, names)) => names.push(&request.name),
            None => sets.push((config, vec![&request.name])),
        }
    }
    let is_one = sets.len() == 1;
    sets.retain(|(config, _)| *config != GpuConfig::default());
    let entry = |(config, names): (GpuConfig, Vec<&str>)| {
        let opaque = json!({"driver": DRIVER_NAME, "parameters": config.encode()});
        if is_one {
            json!({"opaque": opaque})
        } else {
            json!({"requests": names, "opaque": opaque})
        }
    };
    sets.into_iter().map(entry).collect()
}

fn gpu_config(ask: &PodAsk, group: &Group) -> GpuConfig {
    if group.mig_profile.is_some() {
        return GpuConfig { placement: ask.placement, ..GpuConfig::default() };
    }
    let share = &group.share;
    let percent = match share.memory {
        MemoryAsk::Percent(percent) if !share.exclusive => Some(percent),
        _ => None,
    };
    let limit = match share.memory {
        MemoryAsk::Mib(mib) if share.exclusive => Some(Quantity::from_mib(mib)),
        _ => None,
    };
    GpuConfig {
        placement: ask.placement,
        topology: (group.gpus > 1).then(|| topology(ask)).flatten(),
        exclusive: share.exclusive.then_some(true),
        memory: ConfigMemory { percent, limit, oversubscribe: ask.oversubscribe.then_some(true) },
        compute: share.compute,
        sharing: ask.sharing,
    }
}

/// Returns the terms with the first of each scope, as a claim lists each scope once.
fn topology(ask: &PodAsk) -> Option<Vec<TopologyTerm>> {
    let mut terms: Vec<TopologyTerm> = Vec::new();
    for term in &ask.topology {
        if !terms.iter().any(|other| other.scope == term.scope) {
            terms.push(*term);
        }
    }
    (!terms.is_empty()).then_some(terms)
}

/// Returns the first 80 bits of the SHA-256 of the value with sorted keys, in hexadecimal.
fn content_hash(value: &Value) -> String {
    let mut text = String::new();
    write_sorted(value, &mut text);
    Sha256::digest(text).iter().take(10).map(|byte| format!("{byte:02x}")).collect()
}

/// Writes JSON with sorted keys: the order in which a map of serde_json iterates depends on the
/// features that a program is built with.
fn write_sorted(value: &Value, text: &mut String) {
    match value {
        Value::Object(fields) => {
            let sorted: BTreeMap<_, _> = fields.iter().collect();
            text.push('{');
            for (name, value) in sorted {
                text.push_str(&Value::from(name.as_str()).to_string());
                text.push(':');
                write_sorted(value, text);
                text.push(',');
            }
            text.push('}');
        }
        Value::Array(values) => {
            text.push('[');
            for value in values {
                write_sorted(value, text);
                text.push(',');
            }
            text.push(']');
        }
        simple => text.push_str(&simple.to_string()),
    }
}
