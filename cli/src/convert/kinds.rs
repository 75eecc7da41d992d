//! Places of pod templates in objects.

use std::str::FromStr;

use serde_json::Value;

/// Path of pod templates in an object: field names, with `*` for all entries of a list or mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplatePath(Vec<String>);

/// Error returned for a path that is empty or has an empty field name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected field names separated by dots, `*` for all entries: spec.tasks.*.template")]
pub struct TemplatePathError;

impl FromStr for TemplatePath {
    type Err = TemplatePathError;

    fn from_str(text: &str) -> Result<Self, TemplatePathError> {
        let fields: Vec<_> = text.trim_start_matches('.').split('.').map(str::to_owned).collect();
        if fields.iter().any(String::is_empty) {
            return Err(TemplatePathError);
        }
        Ok(Self(fields))
    }
}

/// API group, kind, and paths of its pod templates.
const KINDS: &[(&str, &str, &[&str])] = &[
    ("", "PodTemplate", &["template"]),
    ("", "ReplicationController", &["spec.template"]),
    ("apps", "DaemonSet", &["spec.template"]),
    ("apps", "Deployment", &["spec.template"]),
    ("apps", "ReplicaSet", &["spec.template"]),
    ("apps", "StatefulSet", &["spec.template"]),
    ("batch", "Job", &["spec.template"]),
    ("batch", "CronJob", &["spec.jobTemplate.spec.template"]),
    ("batch.volcano.sh", "Job", &["spec.tasks.*.template"]),
    ("kubeflow.org", "PyTorchJob", &["spec.pytorchReplicaSpecs.*.template"]),
    ("kubeflow.org", "TFJob", &["spec.tfReplicaSpecs.*.template"]),
    ("kubeflow.org", "MPIJob", &["spec.mpiReplicaSpecs.*.template"]),
    ("kubeflow.org", "XGBoostJob", &["spec.xgbReplicaSpecs.*.template"]),
    ("kubeflow.org", "PaddleJob", &["spec.paddleReplicaSpecs.*.template"]),
    ("kubeflow.org", "JAXJob", &["spec.jaxReplicaSpecs.*.template"]),
    ("ray.io", "RayCluster", &["spec.headGroupSpec.template", "spec.workerGroupSpecs.*.template"]),
    (
        "ray.io",
        "RayJob",
        &[
            "spec.rayClusterSpec.headGroupSpec.template",
            "spec.rayClusterSpec.workerGroupSpecs.*.template",
            "spec.submitterPodTemplate",
        ],
    ),
    (
        "ray.io",
        "RayService",
        &[
            "spec.rayClusterConfig.headGroupSpec.template",
            "spec.rayClusterConfig.workerGroupSpecs.*.template",
        ],
    ),
    (
        "leaderworkerset.x-k8s.io",
        "LeaderWorkerSet",
        &["spec.leaderWorkerTemplate.leaderTemplate", "spec.leaderWorkerTemplate.workerTemplate"],
    ),
    ("jobset.x-k8s.io", "JobSet", &["spec.replicatedJobs.*.template.spec.template"]),
    ("argoproj.io", "Rollout", &["spec.template"]),
];

/// Returns the paths of the pod templates of an object: field names and indices.
pub(super) fn pod_templates(object: &Value, extra: &[TemplatePath]) -> Vec<Vec<String>> {
    let (group, kind) = group_and_kind(object);
    if (group, kind) == ("", "Pod") {
        return vec![Vec::new()];
    }
    let known = KINDS.iter().find(|(g, k, _)| (*g, *k) == (group, kind));
    let own = known.into_iter().flat_map(|(_, _, paths)| paths.iter()).map(|path| fields(path));
    let extra = extra.iter().map(|path| path.0.clone());
    let mut found = Vec::new();
    for path in own.chain(extra) {
        expand(object, &path, &mut Vec::new(), &mut found);
    }
    found.sort();
    found.dedup();
    found
}

/// Returns true if the program knows where the kind has its pod templates.
pub(super) fn is_known(object: &Value) -> bool {
    let (group, kind) = group_and_kind(object);
    (group, kind) == ("", "Pod") || KINDS.iter().any(|(g, k, _)| (*g, *k) == (group, kind))
}

fn group_and_kind(object: &Value) -> (&str, &str) {
    let version = object["apiVersion"].as_str().unwrap_or_default();
    let group = version.split_once('/').map_or("", |(group, _)| group);
    (group, object["kind"].as_str().unwrap_or_default())
}

fn fields(path: &str) -> Vec<String> {
    path.split('.').map(str::to_owned).collect()
}

fn expand(value: &Value, path: &[String], at: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    let Some((field, rest)) = path.split_first() else {
        if value.is_object() {
            found.push(at.clone());
        }
        return;
    };
    let entries: Vec<(String, &Value)> = match (field.as_str(), value) {
        ("*", Value::Array(values)) => {
            values.iter().enumerate().map(|(index, value)| (index.to_string(), value)).collect()
        }
        ("*", Value::Object(fields)) => {
            fields.iter().map(|(name, value)| (name.clone(), value)).collect()
        }
        (field, value) => {
            value.get(field).map(|value| (field.to_owned(), value)).into_iter().collect()
        }
    };
    for (name, value) in entries {
        at.push(name);
        expand(value, rest, at, found);
        at.pop();
    }
}

/// Returns the JSON pointer of a path.
pub(super) fn pointer(path: &[String]) -> String {
    path.iter().map(|field| format!("/{}", field.replace('~', "~0").replace('/', "~1"))).collect()
}
