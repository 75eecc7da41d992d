//! KubeGPU and KubeDevice: `nvidia.com/gpu` and the annotation `KubeDevice/DeviceInfo`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};
use tessera_api::config::{ComputePolicy, TopologyMode, TopologyScope, TopologyTerm};

use super::reader::{annotation_path, limit_path};
use super::{Defaults, Names, Read, Reader, owned};
use crate::ask::{ContainerAsk, Group, PodAsk, ShareAsk};
use crate::name::Dialect;
use crate::pod::{Container, Kind, Pod};
use crate::refusal::PodRefusal;
use crate::settings::{Common, Entry, KubegpuSettings};

const INFO: &str = "KubeDevice/DeviceInfo";
/// The name before extended resources. kube-apiserver refuses it; manifests may have it.
const OLDER: &str = "alpha.kubernetes.io/nvidia-gpu";
const TOPOLOGY: &str = "gpu/gpu-generate-topology";
const GROUP: &str = "resource/group/";

impl Read for Entry<KubegpuSettings> {
    fn dialect(&self) -> Dialect {
        Dialect::Kubegpu
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn defaults(&self) -> Defaults {
        Defaults::of(ComputePolicy::None)
    }

    fn names(&self) -> Names {
        Names {
            resources: vec![self.own.resource_name.clone(), OLDER.to_owned()],
            annotations: owned(&[INFO]),
            written: Vec::new(),
        }
    }

    fn read(&self, pod: &Pod<'_>, reader: &mut Reader<'_>) -> Result<PodAsk, PodRefusal> {
        let info = pod.annotation(INFO).map(|text| Info::parse(text, pod, reader)).transpose()?;
        let info = info.unwrap_or_default();
        let mut containers = Vec::new();
        for (index, container) in pod.containers.iter().enumerate() {
            let Some(gpus) = count(&self.own, container, reader)? else { continue };
            let groups = match info.groups.get(container.name) {
                None => ContainerAsk::of(index, gpus, ShareAsk::whole()).groups,
                Some(cliques) => explicit(cliques, gpus, container, reader)?,
            };
            containers.push(ContainerAsk { container: index, groups });
        }
        let mut ask = reader.pod_ask(containers);
        let prefer = |scope| TopologyTerm { scope, mode: TopologyMode::Prefer };
        if info.best_tree && info.groups.is_empty() {
            ask.topology = vec![prefer(TopologyScope::NvLink), prefer(TopologyScope::Pcie)];
        }
        Ok(ask)
    }
}

fn count(
    settings: &KubegpuSettings,
    container: &Container<'_>,
    reader: &Reader<'_>,
) -> Result<Option<u64>, PodRefusal> {
    let positive = |name: &str| {
        let amount = reader.amount(container, name)?;
        Ok(amount.filter(|amount| *amount > 0))
    };
    match (positive(&settings.resource_name)?, positive(OLDER)?) {
        (Some(_), Some(older)) => {
            let problem = format!("cannot be combined with {}; use one", settings.resource_name);
            Err(reader.refusal(limit_path(container, OLDER), older, problem))
        }
        (newer, older) => Ok(newer.or(older)),
    }
}

/// Returns one group per clique, whose sizes add up to the number of GPUs.
fn explicit(
    cliques: &[u64],
    gpus: u64,
    container: &Container<'_>,
    reader: &Reader<'_>,
) -> Result<Vec<Group>, PodRefusal> {
    let total: u64 = cliques.iter().sum();
    if total != gpus {
        let problem = format!(
            "the groups of container {} name {total} GPUs, its resources {gpus}",
            container.name
        );
        return Err(reader.refusal(annotation_path(INFO), total, problem));
    }
    let group = |&gpus: &u64| Group { one_clique: gpus > 1, ..Group::of(gpus, ShareAsk::whole()) };
    Ok(cliques.iter().map(group).collect())
}

/// The parsed annotation.
#[derive(Debug)]
struct Info {
    /// True if the GPUs of a container are placed close to one another.
    best_tree: bool,
    /// Sizes of the groups of GPUs that each container names.
    groups: BTreeMap<String, Vec<u64>>,
}

impl Default for Info {
    fn default() -> Self {
        Self { best_tree: true, groups: BTreeMap::new() }
    }
}

impl Info {
    fn parse(text: &str, pod: &Pod<'_>, reader: &Reader<'_>) -> Result<Self, PodRefusal> {
        let refusal = |path: &str, value: &dyn ToString, problem: &str| -> PodRefusal {
            let field = format!("{}{path}", annotation_path(INFO));
            reader.refusal(field, value.to_string(), problem)
        };
        let root: Value = serde_json::from_str(text)
            .map_err(|error| refusal("", &text, &format!("is no JSON: {error}")))?;
        let mut info = Self::default();
        let requests = |value: &Value| value["requests"].as_object().cloned().unwrap_or_default();
        let pod_requests = requests(&root);
        if let Some(best_tree) = topology(&pod_requests, ".requests", &refusal)? {
            info.best_tree = best_tree;
        }
        let lists = [("runningcontainer", Kind::Regular), ("initcontainer", Kind::Init)];
        for (list, kind) in lists {
            for (name, value) in root[list].as_object().into_iter().flatten() {
                let path = format!(".{list}.{name}");
                let is_regular = |container: &Container<'_>| container.kind == Kind::Regular;
                let mut named = pod.containers.iter().filter(|container| container.name == name);
                if !named.any(|found| is_regular(found) == (kind == Kind::Regular)) {
                    let problem = "is no such container of the pod";
                    return Err(refusal(&path, name, problem));
                }
                let requests = requests(value);
                let path = format!("{path}.requests");
                if let Some(best_tree) = topology(&requests, &path, &refusal)? {
                    info.best_tree = best_tree;
                }
                let cliques = cliques(&requests);
                if !cliques.is_empty() {
                    info.groups.insert(name.clone(), cliques);
                }
            }
        }
        Ok(info)
    }
}

/// Returns true for the best tree of GPUs, false for any GPUs; `None` if it is not named.
fn topology(
    requests: &Map<String, Value>,
    path: &str,
    refusal: &impl Fn(&str, &dyn ToString, &str) -> PodRefusal,
) -> Result<Option<bool>, PodRefusal> {
    match requests.get(TOPOLOGY).map(|value| (value, value.as_u64())) {
        None => Ok(None),
        Some((_, Some(0))) => Ok(Some(false)),
        Some((_, Some(1))) => Ok(Some(true)),
        Some((value, _)) => {
            let path = format!("{path}[{TOPOLOGY}]");
            Err(refusal(&path, value, "expected 0 (any GPUs) or 1 (close to one another)"))
        }
    }
}

/// Returns the sizes of the groups: GPUs with an equal path down to `gpugrp0`.
fn cliques(requests: &Map<String, Value>) -> Vec<u64> {
    let mut groups: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for name in requests.keys() {
        let Some(path) = name.strip_prefix(GROUP).and_then(|path| path.strip_suffix("/cards"))
        else {
            continue;
        };
        if let Some((group, gpu)) = path.split_once("/gpu/") {
            groups.entry(group).or_default().insert(gpu);
        }
    }
    groups.values().map(|gpus| gpus.len() as u64).collect()
}
