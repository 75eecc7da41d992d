//! Random objects of the attacker, of every shape that the API server accepts, and some that it
//! refuses.

use serde_json::{Value, json};
use tessera_e2e::inventory::{DRIVER, GpuInventory};
use tessera_e2e::random::Random;

use crate::objects;

/// Finalizer with which the attacker keeps objects.
pub(super) const FINALIZER: &str = "attacks.tessera.dev/hold";

/// Label of all objects of the attacker.
pub(super) const LABEL: &str = "attacks.tessera.dev/hostile";

/// Names of objects that exist or not.
pub(super) struct Names<'a> {
    pub(super) claims: &'a [String],
    pub(super) templates: &'a [String],
    pub(super) classes: &'a [String],
}

/// Draws shapes from a seed.
#[derive(Clone, Debug)]
pub(super) struct Shapes {
    pub(super) random: Random,
    image: String,
    nodes: Vec<String>,
    /// Selects all GPUs but one of each node. These are left to the honest namespace, as a quota
    /// would: its latency is to show attacks on the programs, and not that all GPUs are in use.
    may_use: Value,
    drawn: usize,
}

impl Shapes {
    pub(super) fn new(seed: u64, image: &str, inventory: &GpuInventory) -> Self {
        let mut pools: Vec<_> = inventory.devices().map(|((pool, _), _)| pool).collect();
        pools.dedup();
        let first = pools.into_iter().filter_map(|pool| inventory.first_of(pool));
        let kept: Vec<String> =
            first.map(|device| format!("'{}'", device.replace("gpu-", "GPU-"))).collect();
        let uuid = format!("device.attributes['{DRIVER}'].uuid");
        Self {
            random: Random::new(seed),
            image: image.to_owned(),
            nodes: inventory.nodes().map(str::to_owned).collect(),
            may_use: objects::selector(&format!("!({uuid} in [{}])", kept.join(", "))),
            drawn: 0,
        }
    }

    /// Returns the metadata of an object.
    fn metadata(&mut self, name: &str) -> Value {
        let mut metadata = json!({"name": name, "labels": {LABEL: "true"}});
        if self.random.chance(5) {
            metadata["finalizers"] = json!([FINALIZER]);
        }
        if self.random.chance(3) {
            metadata["annotations"] = json!({"large": "x".repeat(200_000)});
        }
        metadata
    }

    pub(super) fn claim(&mut self, name: &str, names: &Names<'_>) -> Value {
        json!({"metadata": self.metadata(name), "spec": {"devices": self.devices(names)}})
    }

    pub(super) fn template(&mut self, name: &str, names: &Names<'_>) -> Value {
        let devices = self.devices(names);
        json!({"metadata": self.metadata(name), "spec": {"spec": {"devices": devices}}})
    }

    pub(super) fn class(&mut self, name: &str) -> Value {
        self.drawn += 1;
        let selectors = match self.random.between(0, 3) {
            0 => json!([]),
            1 => json!([objects::expensive_selector(self.drawn)]),
            2 => json!([objects::large_selector(self.drawn)]),
            _ => json!([objects::selector("device.driver == 'gpu.tessera.dev'")]),
        };
        json!({"metadata": self.metadata(name), "spec": {"selectors": selectors}})
    }

    fn devices(&mut self, names: &Names<'_>) -> Value {
        self.drawn += 1;
        let number = self.drawn;
        match self.random.between(0, 99) {
            0..4 => objects::expensive(number),
            4..7 => objects::large(number, 6),
            7..9 => objects::large(number, 20),
            9..19 => self.alternatives(names),
            19..24 => self.many_requests(names),
            24..29 => self.constrained(names),
            29..37 => self.configured(names),
            _ => json!({"requests": [self.request("gpu", names)]}),
        }
    }

    fn request(&mut self, name: &str, names: &Names<'_>) -> Value {
        let mut exactly = self.exactly(names);
        match self.random.between(0, 19) {
            0 => exactly["allocationMode"] = "All".into(),
            1..4 => exactly["count"] = self.random.between(2, 5).into(),
            4 => exactly["tolerations"] = json!([{"key": "other", "operator": "Exists"}]),
            // Both are refused: by a policy, and without the namespace's label.
            5 => {
                exactly["tolerations"] =
                    json!([{"key": "gpu.tessera.dev/managed", "operator": "Exists"}])
            }
            6 => exactly["adminAccess"] = true.into(),
            _ => {}
        }
        json!({"name": name, "exactly": exactly})
    }

    /// Returns the content of a request, which a sub-request has as well.
    fn exactly(&mut self, names: &Names<'_>) -> Value {
        let memory = ["1", "1Mi", "1500m", "1Gi", "8Gi", "19Gi", "40Gi", "79Gi", "900Gi", "8Pi"];
        let mut requests = json!({"memory": self.random.one_of(&memory)});
        if self.random.chance(40) {
            let cores = ["0", "1", "25", "60", "100", "101"];
            requests["cores"] = (*self.random.one_of(&cores)).into();
        }
        let mut exactly = json!({
            "deviceClassName": self.class_name(names),
            "selectors": [self.may_use, self.selector()],
            "capacity": {"requests": requests},
        });
        if self.random.chance(10) {
            exactly.as_object_mut().map(|fields| fields.remove("capacity"));
        }
        exactly
    }

    fn class_name(&mut self, names: &Names<'_>) -> String {
        let known = [DRIVER, "h100.gpu.tessera.dev", "a100.gpu.tessera.dev"];
        match self.random.between(0, 99) {
            0..5 => "unknown.example.com".to_owned(),
            5..20 if !names.classes.is_empty() => self.random.one_of(names.classes).clone(),
            20..30 => (*self.random.one_of(&known)).to_owned(),
            _ => DRIVER.to_owned(),
        }
    }

    fn selector(&mut self) -> Value {
        let number = self.random.between(0, 1_000_000);
        let attributes = format!("device.attributes['{DRIVER}']");
        objects::selector(&match self.random.between(0, 19) {
            0 => format!("{attributes}.index == {}", number % 9),
            1 => format!("{attributes}.productName.matches('.*(H|A)100.*{number}?')"),
            // Fails when it is evaluated.
            2 => format!("{attributes}.missing{number} > 1"),
            3 => {
                format!("device.capacity['{DRIVER}'].memory.isGreaterThan(quantity('{number}Ki'))")
            }
            4 => format!("{attributes}.driverVersion.compareTo(semver('1.2.{number}')) > 0"),
            5 => "device.driver == 'other.example.com'".to_owned(),
            _ => format!("{attributes}.index > -{number}"),
        })
    }

    fn alternatives(&mut self, names: &Names<'_>) -> Value {
        let count = self.random.between(1, 8);
        let alternative = |index: u64| {
            let mut alternative = self.exactly(names);
            alternative["name"] = format!("r{index}").into();
            alternative
        };
        let alternatives: Vec<Value> = (0..count).map(alternative).collect();
        json!({"requests": [{"name": "gpu", "firstAvailable": alternatives}]})
    }

    fn many_requests(&mut self, names: &Names<'_>) -> Value {
        let count = self.random.between(2, 32);
        let requests: Vec<Value> =
            (0..count).map(|index| self.request(&format!("r{index}"), names)).collect();
        json!({"requests": requests})
    }

    fn constrained(&mut self, names: &Names<'_>) -> Value {
        let requests = [self.request("r0", names), self.request("r1", names)];
        let attributes = ["numaNode", "productName", "nvlinkClique", "unknown"];
        let attribute = self.random.one_of(&attributes);
        let constraint = match self.random.chance(50) {
            true => json!({"matchAttribute": format!("{DRIVER}/{attribute}")}),
            false => {
                json!({"matchAttribute": "resource.kubernetes.io/pcieRoot", "requests": ["r0", "r1"]})
            }
        };
        json!({"requests": requests, "constraints": [constraint]})
    }

    fn configured(&mut self, names: &Names<'_>) -> Value {
        let fields = [
            json!({"memory": {"percent": 20}}),
            json!({"memory": {"oversubscribe": true}}),
            json!({"compute": {"policy": "Balance", "priority": "Low"}}),
            json!({"sharing": "Exclusive"}),
            json!({"sharing": "MPS"}),
            json!({"placement": {"policy": "LeastFragmentation"}}),
            json!({"unknown": {"field": "x".repeat(9000)}}),
        ];
        let mut parameters = self.random.one_of(&fields).clone();
        parameters["apiVersion"] = "gpu.tessera.dev/v1alpha1".into();
        parameters["kind"] = "GpuConfig".into();
        let config = json!({"opaque": {"driver": DRIVER, "parameters": parameters}});
        json!({"requests": [self.request("gpu", names)], "config": [config]})
    }

    pub(super) fn pod(&mut self, name: &str, names: &Names<'_>) -> Value {
        let count = match self.random.between(0, 19) {
            0 => 0,
            1..15 => 1,
            15..19 => self.random.between(2, 4),
            _ => 20,
        };
        let entries: Vec<Value> = (0..count).map(|index| self.entry(index, names)).collect();
        let mut pod = objects::pod(name, &self.image, &entries);
        pod["metadata"] = self.metadata(name);
        self.vary(&mut pod["spec"]);
        pod
    }

    /// Returns a reference to a claim or template, which may not exist.
    fn entry(&mut self, index: u64, names: &Names<'_>) -> Value {
        let (field, existing) = match self.random.chance(50) {
            true => ("resourceClaimName", names.claims),
            false => ("resourceClaimTemplateName", names.templates),
        };
        let name = match existing {
            [] => "missing".to_owned(),
            _ if self.random.chance(5) => "missing".to_owned(),
            existing => self.random.one_of(existing).clone(),
        };
        json!({"name": format!("gpu-{index}"), field: name})
    }

    fn vary(&mut self, spec: &mut Value) {
        match self.random.between(0, 19) {
            0 => spec["schedulingGates"] = json!([{"name": "attacks.tessera.dev/gate"}]),
            1 => spec["schedulerName"] = "none".into(),
            2 => spec["nodeSelector"] = json!({"no-such": "label"}),
            // Not for the scheduler: the kubelet gets the pod at once.
            3 => spec["nodeName"] = self.random.one_of(&self.nodes.clone()).as_str().into(),
            4 => spec["terminationGracePeriodSeconds"] = 0.into(),
            5 => {
                let mut first = spec["containers"][0].clone();
                first["name"] = "first".into();
                spec["initContainers"] = json!([first]);
            }
            6 => spec["containers"][0]["resources"]["claims"] = json!([]),
            7 => spec["containers"][0]["image"] = "no.such/image:1".into(),
            8 => spec["containers"][0]["resources"]["requests"] = json!({"cpu": "1000"}),
            _ => {}
        }
    }

    /// Returns a merge patch of an object of that kind, which may be refused.
    pub(super) fn change(&mut self, kind: &str) -> Value {
        let number = self.random.between(0, 1_000_000);
        match self.random.between(0, 9) {
            0 => json!({"metadata": {"finalizers": [FINALIZER]}}),
            1 => json!({"metadata": {"finalizers": null}}),
            2 => {
                json!({"metadata": {"annotations": {"large": "x".repeat(100_000), "n": number.to_string()}}})
            }
            3 if kind == "Pod" => json!({"spec": {"schedulingGates": []}}),
            // Immutable, but for a class.
            4 if kind != "Pod" => json!({"spec": self.class("any")["spec"]}),
            5 if kind == "ResourceClaim" => {
                json!({"status": {"allocation": null, "reservedFor": null}})
            }
            _ => json!({"metadata": {"labels": {"n": number.to_string()}}}),
        }
    }
}
