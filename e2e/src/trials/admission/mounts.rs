//! Policy `tessera-mounts`: a pod with claims cannot mount at, above or under its grants'
//! directory.

use serde_json::{Value, json};

use super::harness::{ADMINISTRATOR, Action, AdmissionHarness, EDITOR, Target, all};

const MESSAGE: &str = "/dev/tessera";

/// Paths at, above or under the directory, as a runtime resolves them.
const DENIED_PATHS: [&str; 9] = [
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
const ALLOWED_PATHS: [&str; 5] =
    ["/dev/shm", "/dev/tessera2", "/devices", "/data/dev/tessera", "/run/tessera"];

pub(super) async fn check(harness: &AdmissionHarness) -> anyhow::Result<()> {
    for path in DENIED_PATHS {
        expect_denied(harness, &format!("a volume at {path}"), pod(mounted(path))).await;
    }
    expect_denied(harness, "a volume at a path with ..", pod(mounted("/tmp/../dev"))).await;
    for path in ALLOWED_PATHS {
        harness
            .expect_creatable(EDITOR, &format!("a volume at {path}"), "pods", pod(mounted(path)))
            .await;
    }
    for (kind, container) in kinds_of_mounts() {
        expect_denied(harness, &format!("{kind} at /dev/tessera/x"), pod(container)).await;
    }
    let device = json!({"volumeDevices": [{"name": "block", "devicePath": "/dev/xvda"}]});
    harness.expect_creatable(EDITOR, "a block device at /dev/xvda", "pods", pod(device)).await;

    let mut initial = pod(json!({}));
    initial["spec"]["initContainers"] = json!([container("before", mounted("/dev/tessera"))]);
    expect_denied(harness, "a volume of an init container", initial).await;
    let mut unclaimed = pod(mounted("/dev"));
    unclaimed["spec"]["resourceClaims"] = Value::Null;
    harness
        .expect_creatable(EDITOR, "a volume at /dev in a pod without claims", "pods", unclaimed)
        .await;
    let mut extended = pod(mounted("/dev"));
    extended["spec"]["resourceClaims"] = Value::Null;
    let limits = json!({"deviceclass.resource.kubernetes.io/gpu.tessera.dev": "1"});
    extended["spec"]["containers"][0]["resources"] = json!({"limits": limits});
    expect_denied(harness, "a volume of a pod with an extended resource", extended).await;
    largest(harness).await;
    Ok(())
}

/// Ephemeral containers can have volumes, too.
pub(super) async fn check_ephemeral_containers(harness: &AdmissionHarness) -> anyhow::Result<()> {
    harness.expect_allowed(EDITOR, "a pod", all("pods"), Action::Create(pod(json!({})))).await;
    let at = Target("pods", "test", "ephemeralcontainers");
    let with = |name: &str, path: &str| {
        let debugger = container(name, mounted(path));
        Action::Merge(json!({"spec": {"ephemeralContainers": [debugger]}}))
    };
    for path in ["/dev/tessera", "/dev"] {
        let what = format!("an ephemeral container with a volume at {path}");
        harness.expect_denied(ADMINISTRATOR, &what, MESSAGE, at, with("debug", path)).await;
    }
    harness
        .expect_allowed(
            ADMINISTRATOR,
            "an ephemeral container with a volume elsewhere",
            at,
            with("debug", "/data"),
        )
        .await;
    harness
        .expect_allowed(
            ADMINISTRATOR,
            "deleting the pod",
            Target("pods", "test", ""),
            Action::Delete,
        )
        .await;
    Ok(())
}

async fn expect_denied(harness: &AdmissionHarness, what: &str, pod: Value) {
    for by in [EDITOR, ADMINISTRATOR] {
        harness.expect_denied(by, what, MESSAGE, all("pods"), Action::Create(pod.clone())).await;
    }
}

fn mounted(path: &str) -> Value {
    json!({"volumeMounts": [{"name": "empty", "mountPath": path}]})
}

/// Returns every kind of mount, at a path under the directory of the grants.
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
            "a mount with propagation from the host",
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

/// Returns a pod with a claim that is never scheduled.
fn pod(of_container: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "test"},
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

/// The cost of a policy has a limit, above which every request would be denied.
async fn largest(harness: &AdmissionHarness) {
    let mounts: Vec<_> = (0..40)
        .map(|number| json!({"name": "empty", "mountPath": format!("/var/lib/application/data/{number}")}))
        .collect();
    let containers: Vec<_> = (0..100)
        .map(|number| container(&format!("c-{number}"), json!({"volumeMounts": mounts})))
        .collect();
    let mut large = pod(json!({}));
    large["spec"]["containers"] = containers.into();
    harness
        .expect_creatable(
            EDITOR,
            "a pod of 100 containers with 40 volumes each",
            "pods",
            large.clone(),
        )
        .await;
    large["spec"]["containers"][99]["volumeMounts"][39]["mountPath"] = "/dev/tessera".into();
    expect_denied(harness, "a forbidden volume in the last of 100 containers", large).await;
}
