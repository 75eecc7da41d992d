//! A pod with claims mounts nothing at, above or under the place of its grants.

use serde_json::{Value, json};

use super::desk::{ADMINISTRATOR, Ask, At, Desk, EDITOR, all};

const SAYS: &str = "/dev/tessera";

/// Paths that are at, above or under it, as a runtime resolves them.
const BAD: [&str; 9] = [
    "/dev/tessera",
    "/dev/tessera/",
    "/dev/tessera/x/grant",
    "/dev",
    "/dev/",
    "/",
    "//dev/./tessera",
    "dev/tessera",
    "./dev",
];
const GOOD: [&str; 5] =
    ["/dev/shm", "/dev/tessera2", "/devices", "/data/dev/tessera", "/run/tessera"];

pub(super) async fn check(desk: &Desk) -> anyhow::Result<()> {
    for path in BAD {
        refused(desk, &format!("a volume at {path}"), pod(mounted(path))).await;
    }
    refused(desk, "a volume at a path with ..", pod(mounted("/tmp/../dev"))).await;
    for path in GOOD {
        desk.creatable(EDITOR, &format!("a volume at {path}"), "pods", pod(mounted(path))).await;
    }
    for (kind, container) in kinds_of_mounts() {
        refused(desk, &format!("{kind} at /dev/tessera/x"), pod(container)).await;
    }
    let device = json!({"volumeDevices": [{"name": "block", "devicePath": "/dev/xvda"}]});
    desk.creatable(EDITOR, "a block device at /dev/xvda", "pods", pod(device)).await;

    let mut initial = pod(json!({}));
    initial["spec"]["initContainers"] = json!([container("before", mounted("/dev/tessera"))]);
    refused(desk, "a volume of an init container", initial).await;
    let mut unclaimed = pod(mounted("/dev"));
    unclaimed["spec"]["resourceClaims"] = Value::Null;
    desk.creatable(EDITOR, "a volume at /dev in a pod without claims", "pods", unclaimed).await;
    largest(desk).await;
    Ok(())
}

/// Containers that are added to a running pod have volumes too.
pub(super) async fn check_ephemeral_containers(desk: &Desk) -> anyhow::Result<()> {
    desk.allowed(EDITOR, "a pod", all("pods"), Ask::Create(pod(json!({})))).await;
    let at = At("pods", "try", "ephemeralcontainers");
    let with = |name: &str, path: &str| {
        let debugger = container(name, mounted(path));
        Ask::Merge(json!({"spec": {"ephemeralContainers": [debugger]}}))
    };
    for path in ["/dev/tessera", "/dev"] {
        let what = format!("an ephemeral container with a volume at {path}");
        desk.refused(ADMINISTRATOR, &what, SAYS, at, with("debug", path)).await;
    }
    desk.allowed(
        ADMINISTRATOR,
        "an ephemeral container with a volume elsewhere",
        at,
        with("debug", "/data"),
    )
    .await;
    desk.allowed(ADMINISTRATOR, "deleting the pod", At("pods", "try", ""), Ask::Delete).await;
    Ok(())
}

async fn refused(desk: &Desk, what: &str, pod: Value) {
    for by in [EDITOR, ADMINISTRATOR] {
        desk.refused(by, what, SAYS, all("pods"), Ask::Create(pod.clone())).await;
    }
}

fn mounted(path: &str) -> Value {
    json!({"volumeMounts": [{"name": "empty", "mountPath": path}]})
}

/// Every way of putting something into a container, at a place under that of the grants.
fn kinds_of_mounts() -> [(&'static str, Value); 8] {
    let mount = |volume: &str, rest: Value| {
        let mut mount = rest;
        mount["name"] = volume.into();
        mount["mountPath"] = "/dev/tessera/x".into();
        json!({"volumeMounts": [mount]})
    };
    [
        ("a directory of a volume", mount("empty", json!({"subPath": "forged", "readOnly": true}))),
        (
            "a directory named by the environment",
            mount("empty", json!({"subPathExpr": "$(HOSTNAME)"})),
        ),
        (
            "a mount that sees later ones",
            mount("empty", json!({"mountPropagation": "HostToContainer"})),
        ),
        ("a projected volume", mount("projected", json!({}))),
        ("an image", mount("image", json!({}))),
        ("a directory of the node", mount("node", json!({}))),
        ("a claimed volume", mount("claimed", json!({}))),
        (
            "a block device",
            json!({"volumeDevices": [{"name": "block", "devicePath": "/dev/tessera/x"}]}),
        ),
    ]
}

fn container(name: &str, rest: Value) -> Value {
    let mut container = rest;
    container["name"] = name.into();
    container["image"] = "example.com/nothing".into();
    container
}

/// A pod with a claim, which is never scheduled.
fn pod(of_container: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "try"},
        "spec": {
            "schedulingGates": [{"name": "e2e.tessera.dev/never"}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "nothing"}],
            "containers": [container("main", of_container)],
            "volumes": [
                {"name": "empty", "emptyDir": {}},
                {"name": "projected", "projected": {"sources": [{"configMap": {"name": "c"}}]}},
                {"name": "image", "image": {"reference": "example.com/nothing"}},
                {"name": "node", "hostPath": {"path": "/run/tessera"}},
                {"name": "claimed", "persistentVolumeClaim": {"claimName": "c"}},
                {"name": "block", "persistentVolumeClaim": {"claimName": "c"}},
            ],
        },
    })
}

/// The cost of a policy has a limit; beyond it everything would be refused.
async fn largest(desk: &Desk) {
    let mounts: Vec<_> = (0..40)
        .map(|number| json!({"name": "empty", "mountPath": format!("/var/lib/application/data/{number}")}))
        .collect();
    let containers: Vec<_> = (0..100)
        .map(|number| container(&format!("c-{number}"), json!({"volumeMounts": mounts})))
        .collect();
    let mut large = pod(json!({}));
    large["spec"]["containers"] = containers.into();
    desk.creatable(EDITOR, "a pod of 100 containers with 40 volumes each", "pods", large.clone())
        .await;
    large["spec"]["containers"][99]["volumeMounts"][39]["mountPath"] = "/dev/tessera".into();
    refused(desk, "a volume at the end of it", large).await;
}
