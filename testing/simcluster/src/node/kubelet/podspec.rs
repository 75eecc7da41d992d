//! Conversion of a pod's spec into a container configuration.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, EnvVar, Pod, PodSecurityContext, SecurityContext};
use kube::ResourceExt;

use crate::node::container::{BindMount, ContainerConfig, ContainerId, RunAs};

/// Container spec that is invalid or not supported by the fake kubelet.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum ConfigError {
    #[error("the fake kubelet does not support {0}")]
    Unsupported(String),
    #[error("container has runAsNonRoot and image will run as root")]
    RunsAsRoot,
    #[error("volume mount `{0}` names an unknown volume")]
    UnknownVolume(String),
    #[error("invalid `{field}` of the pod: {value}: not a user or group ID")]
    InvalidId { field: &'static str, value: i64 },
}

/// Returns the directory of the pod's volumes on this node.
pub(crate) fn volumes_directory(kubelet_root: &Path, pod: &Pod) -> PathBuf {
    kubelet_root.join("pods").join(pod.uid().unwrap_or_default()).join("volumes")
}

/// Returns the pod's shared memory, mounted as `/dev/shm` in all of its containers.
pub(crate) fn shared_memory(kubelet_root: &Path, pod: &Pod) -> PathBuf {
    kubelet_root.join("pods").join(pod.uid().unwrap_or_default()).join("shm")
}

/// Returns the container as the runtime shall start it.
pub(crate) fn container_config(
    pod: &Pod,
    container: &Container,
    attempt: u32,
    cdi_devices: Vec<String>,
    kubelet_root: &Path,
) -> Result<ContainerConfig, ConfigError> {
    let spec = pod.spec.as_ref();
    let pod_security = spec.and_then(|spec| spec.security_context.as_ref());
    let security = container.security_context.as_ref();
    if container.restart_policy.is_some() {
        return Err(ConfigError::Unsupported("restartPolicy of a single container".into()));
    }
    if security.and_then(|security| security.privileged) == Some(true) {
        return Err(ConfigError::Unsupported("privileged containers".into()));
    }
    Ok(ContainerConfig {
        id: ContainerId {
            pod_uid: pod.uid().unwrap_or_default(),
            name: container.name.clone(),
            attempt,
        },
        image: container.image.clone().unwrap_or_default(),
        hostname: spec.and_then(|spec| spec.hostname.clone()).unwrap_or_else(|| pod.name_any()),
        command: container.command.clone().unwrap_or_default(),
        args: container.args.clone().unwrap_or_default(),
        env: environment(pod, container)?,
        mounts: mounts(pod, container, kubelet_root)?,
        cdi_devices,
        working_dir: container.working_dir.clone().unwrap_or_else(|| "/".into()).into(),
        read_only_root: security
            .and_then(|security| security.read_only_root_filesystem)
            .unwrap_or(false),
        user: user(pod_security, security)?,
        no_new_privileges: security.and_then(|security| security.allow_privilege_escalation)
            == Some(false),
        user_namespace: spec.and_then(|spec| spec.host_users) == Some(false),
    })
}

fn environment(pod: &Pod, container: &Container) -> Result<BTreeMap<String, String>, ConfigError> {
    if container.env_from.as_ref().is_some_and(|sources| !sources.is_empty()) {
        return Err(ConfigError::Unsupported("envFrom".into()));
    }
    let value = |var: &EnvVar| match &var.value_from {
        None => Ok((var.name.clone(), var.value.clone().unwrap_or_default())),
        Some(source) => {
            let path = source
                .field_ref
                .as_ref()
                .map(|field| field.field_path.as_str())
                .unwrap_or_default();
            let value = match path {
                "metadata.name" => pod.name_any(),
                "metadata.namespace" => pod.namespace().unwrap_or_default(),
                "metadata.uid" => pod.uid().unwrap_or_default(),
                "spec.nodeName" => {
                    pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default()
                }
                _ => {
                    return Err(ConfigError::Unsupported(format!(
                        "valueFrom of the variable {}",
                        var.name
                    )));
                }
            };
            Ok((var.name.clone(), value))
        }
    };
    container.env.iter().flatten().map(value).collect()
}

fn mounts(
    pod: &Pod,
    container: &Container,
    kubelet_root: &Path,
) -> Result<Vec<BindMount>, ConfigError> {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    let directory = volumes_directory(kubelet_root, pod);
    let memory = shared_memory(kubelet_root, pod);
    let mut mounts =
        vec![BindMount { source: memory, target: "/dev/shm".into(), read_only: false }];
    for mount in container.volume_mounts.iter().flatten() {
        let volume = volumes.into_iter().flatten().find(|volume| volume.name == mount.name);
        let volume = volume.ok_or_else(|| ConfigError::UnknownVolume(mount.name.clone()))?;
        if volume.empty_dir.is_none() || mount.sub_path.is_some() {
            return Err(ConfigError::Unsupported(format!(
                "volume `{}`: only whole emptyDir volumes",
                mount.name
            )));
        }
        mounts.push(BindMount {
            source: directory.join(&mount.name),
            target: mount.mount_path.clone().into(),
            read_only: mount.read_only == Some(true),
        });
    }
    Ok(mounts)
}

fn user(
    pod: Option<&PodSecurityContext>,
    container: Option<&SecurityContext>,
) -> Result<RunAs, ConfigError> {
    let id = |field, value: Option<i64>| {
        let value = value.unwrap_or(0);
        u32::try_from(value).map_err(|_| ConfigError::InvalidId { field, value })
    };
    let uid = container
        .and_then(|context| context.run_as_user)
        .or(pod.and_then(|context| context.run_as_user));
    let gid = container
        .and_then(|context| context.run_as_group)
        .or(pod.and_then(|context| context.run_as_group));
    let non_root = container
        .and_then(|context| context.run_as_non_root)
        .or(pod.and_then(|context| context.run_as_non_root));
    let uid = id("runAsUser", uid)?;
    if non_root == Some(true) && uid == 0 {
        return Err(ConfigError::RunsAsRoot);
    }
    let groups = pod.and_then(|context| context.supplemental_groups.clone()).unwrap_or_default();
    let groups = groups
        .into_iter()
        .map(|group| id("supplementalGroups", Some(group)))
        .collect::<Result<_, _>>()?;
    Ok(RunAs { uid, gid: id("runAsGroup", gid)?, groups })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(spec: serde_json::Value) -> Pod {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec});
        serde_json::from_value(pod).unwrap()
    }

    fn config(pod: &Pod) -> Result<ContainerConfig, ConfigError> {
        let container = &pod.spec.as_ref().unwrap().containers[0];
        container_config(pod, container, 0, vec![], Path::new("/kubelet"))
    }

    #[test]
    fn container_user_overrides_pod_user() {
        let pod = pod(json!({
            "securityContext": {"runAsUser": 1, "runAsGroup": 2, "supplementalGroups": [3]},
            "containers": [{"name": "c", "securityContext": {"runAsUser": 1000, "readOnlyRootFilesystem": true}}],
            "hostUsers": false,
        }));
        let config = config(&pod).unwrap();
        assert_eq!(config.user, RunAs { uid: 1000, gid: 2, groups: vec![3] });
        assert!(config.read_only_root && config.user_namespace);
        assert_eq!(config.hostname, "p");
    }

    #[test]
    fn run_as_non_root_refuses_root() {
        let pod =
            pod(json!({"securityContext": {"runAsNonRoot": true}, "containers": [{"name": "c"}]}));
        assert_eq!(config(&pod).unwrap_err(), ConfigError::RunsAsRoot);
    }

    #[test]
    fn unsupported_fields_are_refused_by_name() {
        let pod = pod(json!({
            "containers": [{"name": "c", "volumeMounts": [{"name": "host", "mountPath": "/host"}]}],
            "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        }));
        assert!(config(&pod).unwrap_err().to_string().contains("`host`"));
    }
}
