//! Random pod shapes: claims, containers, and the time of deletion.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::inventory::DRIVER;
use crate::random::Random;
use crate::trials::test_bed::phase;

/// Claim templates: seven that fit any GPU of the cluster, and one that fits none.
pub(super) const TEMPLATES: [&str; 8] =
    ["tiny", "eighth", "quarter", "cores", "percent", "whole", "pair", IMPOSSIBLE];

const IMPOSSIBLE: &str = "impossible";

/// Returns the `spec.devices` of a template.
pub(super) fn devices(template: &str) -> Value {
    let request = |requests: Value| json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER, "capacity": {"requests": requests}}}]});
    match template {
        "tiny" => request(json!({"memory": "1Gi"})),
        "eighth" => request(json!({"memory": "8Gi", "cores": "10"})),
        "quarter" => request(json!({"memory": "19Gi", "cores": "25"})),
        "cores" => request(json!({"memory": "2Gi", "cores": "60"})),
        "whole" => json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}),
        "pair" => {
            let mut devices = request(json!({"memory": "30Gi", "cores": "30"}));
            devices["requests"][0]["exactly"]["count"] = 2.into();
            devices
        }
        "percent" => {
            let mut devices = request(json!({"cores": "5"}));
            let parameters = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "memory": {"percent": 20}});
            devices["config"] = json!([{"opaque": {"driver": DRIVER, "parameters": parameters}}]);
            devices
        }
        _ => request(json!({"memory": "500Gi"})),
    }
}

/// State of a pod in which it is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeletionState {
    /// Created.
    Created,
    /// Reported as unschedulable.
    Unschedulable,
    /// Bound to a node, containers are being prepared.
    Bound,
    /// Running.
    Running,
    /// Ended by itself.
    Ended,
}

/// Shape of one pod.
#[derive(Clone, Debug)]
pub(super) struct PodShape {
    delete_in: DeletionState,
    /// Deletion without a grace period: the object is deleted immediately, and the kubelet detects
    /// that later.
    pub(super) is_forced: bool,
    templates: Vec<&'static str>,
    has_init_container: bool,
    image: &'static str,
}

impl PodShape {
    /// Returns a random shape. `started` is the percentage of pods that run in real containers. A
    /// pod that shares a claim never has an unsatisfiable one.
    pub(super) fn random(random: &mut Random, started: u64, is_sharing: bool) -> Self {
        let impossible = random.chance(3) && !is_sharing;
        let delete_in = match random.between(0, 99) {
            _ if impossible => DeletionState::Unschedulable,
            0..10 => DeletionState::Created,
            10..25 => DeletionState::Bound,
            25..65 => DeletionState::Running,
            _ => DeletionState::Ended,
        };
        let mut templates = vec![if impossible { IMPOSSIBLE } else { possible(random) }];
        if random.chance(15) {
            templates.push("tiny");
        }
        Self {
            delete_in,
            is_forced: random.chance(20),
            templates,
            has_init_container: random.chance(15),
            image: if random.chance(started) {
                "tessera/probe:e2e"
            } else {
                "tessera/probe-unstarted:e2e"
            },
        }
    }

    /// Returns the pod object. With `shared`, the pod uses that claim instead of its own.
    pub(super) fn object(&self, name: &str, shared: Option<&str>) -> Value {
        let entry = |(number, template): (usize, &&str)| json!({"name": format!("gpu-{number}"), "resourceClaimTemplateName": template});
        let mut claims: Vec<Value> = self.templates.iter().enumerate().map(entry).collect();
        if let Some(shared) = shared {
            claims = vec![json!({"name": "gpu-0", "resourceClaimName": shared})];
        }
        let used: Vec<Value> = claims.iter().map(|claim| json!({"name": claim["name"]})).collect();
        let container = |name: &str, command: &[&str]| {
            json!({"name": name, "image": self.image, "imagePullPolicy": "Never", "command": command,
                "resources": {"claims": used}})
        };
        let see = ["tessera-probe", "see"];
        let hold = ["tessera-probe", "hold", "--take", "1Mi"];
        let command = if self.delete_in == DeletionState::Ended { &see[..] } else { &hold[..] };
        let mut spec = json!({
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 2,
            "containers": [container("main", command)],
            "resourceClaims": claims,
        });
        if self.has_init_container {
            spec["initContainers"] = json!([container("first", &see)]);
        }
        json!({"metadata": {"name": name}, "spec": spec})
    }

    /// Returns true if the pod has reached the state in which it is deleted.
    pub(super) fn is_due(&self, pod: &Pod) -> bool {
        let over = matches!(phase(pod), "Succeeded" | "Failed");
        let bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        match self.delete_in {
            DeletionState::Created => true,
            DeletionState::Unschedulable => is_unschedulable(pod),
            DeletionState::Bound => bound,
            DeletionState::Running => over || phase(pod) == "Running",
            DeletionState::Ended => over,
        }
    }
}

fn possible(random: &mut Random) -> &'static str {
    // Small claims are the most frequent; the last template fits no GPU.
    match random.between(0, 99) {
        0..75 => TEMPLATES[usize::try_from(random.between(0, 4)).unwrap_or(0)],
        75..90 => "pair",
        _ => "whole",
    }
}

fn is_unschedulable(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "PodScheduled" && condition.status == "False")
}
