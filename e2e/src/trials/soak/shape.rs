//! Shapes of pods: what they claim, how they run, and when somebody deletes them.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::inventory::DRIVER;
use crate::random::Random;
use crate::trials::bench::phase;

/// Templates of claims: what fits any GPU of the cluster, and one that fits none.
pub(super) const TEMPLATES: [&str; 8] =
    ["sliver", "eighth", "quarter", "cores", "percent", "whole", "pair", IMPOSSIBLE];

const IMPOSSIBLE: &str = "impossible";

/// The `spec.devices` of a template.
pub(super) fn devices(template: &str) -> Value {
    let request = |requests: Value| json!({"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER, "capacity": {"requests": requests}}}]});
    match template {
        "sliver" => request(json!({"memory": "1Gi"})),
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

/// When a pod is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// As soon as it is there.
    Created,
    /// The scheduler has found no node for it.
    Unschedulable,
    /// It has a node, and is being prepared.
    Bound,
    /// Its containers run.
    Running,
    /// It has ended by itself.
    Ended,
}

/// One pod.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    moment: Moment,
    /// Without grace: the object goes at once, and its kubelet finds that out.
    pub(super) by_force: bool,
    templates: Vec<&'static str>,
    has_init_container: bool,
    image: &'static str,
}

impl Shape {
    /// A pod of any shape. So many of a hundred run in real containers. One that is to share a
    /// claim is no impossible one.
    pub(super) fn random(random: &mut Random, started: u64, shares: bool) -> Self {
        let impossible = random.percent(3) && !shares;
        let moment = match random.between(0, 99) {
            _ if impossible => Moment::Unschedulable,
            0..10 => Moment::Created,
            10..25 => Moment::Bound,
            25..65 => Moment::Running,
            _ => Moment::Ended,
        };
        let mut templates = vec![if impossible { IMPOSSIBLE } else { possible(random) }];
        if random.percent(15) {
            templates.push("sliver");
        }
        Self {
            moment,
            by_force: random.percent(20),
            templates,
            has_init_container: random.percent(15),
            image: if random.percent(started) {
                "tessera/probe:e2e"
            } else {
                "tessera/probe-unstarted:e2e"
            },
        }
    }

    /// The same with a claim that others use as well, named by `shared`, in place of one of its
    /// own.
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
        let look = ["tessera-probe", "see"];
        let hold = ["tessera-probe", "hold", "--take", "1Mi"];
        let command = if self.moment == Moment::Ended { &look[..] } else { &hold[..] };
        let mut spec = json!({
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 2,
            "containers": [container("main", command)],
            "resourceClaims": claims,
        });
        if self.has_init_container {
            spec["initContainers"] = json!([container("first", &look)]);
        }
        json!({"metadata": {"name": name}, "spec": spec})
    }

    /// Whether the moment has come in which the pod is deleted; or later.
    pub(super) fn is_due(&self, pod: &Pod) -> bool {
        let over = matches!(phase(pod), "Succeeded" | "Failed");
        let bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
        match self.moment {
            Moment::Created => true,
            Moment::Unschedulable => is_unschedulable(pod),
            Moment::Bound => bound,
            Moment::Running => over || phase(pod) == "Running",
            Moment::Ended => over,
        }
    }
}

fn possible(random: &mut Random) -> &'static str {
    // Small ones are many, as they are in life; the last one fits nowhere.
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
