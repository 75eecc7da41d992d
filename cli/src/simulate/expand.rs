//! Objects of manifests beside those of a snapshot: what Kubernetes' own controllers would make of
//! them.

use k8s_openapi::api::core::v1::{
    Container, Pod, PodResourceClaimStatus, PodSpec, ResourceRequirements,
};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use tessera_api::names::{Namespace, PodName};

use super::manifest::{Manifests, Object, Workload};
use crate::snapshot::{self, Snapshot};

/// What has come into the snapshot.
pub(super) struct Expanded {
    /// The pods of the manifests, in their order, and whether the cluster had one of that name
    /// already.
    pub(super) pods: Vec<(Namespace, PodName, bool)>,
    pub(super) notes: Vec<String>,
}

/// Puts the objects into the snapshot. Classes, templates, nodes, slices and taint rules replace
/// those of the same name; claims and pods that are there already stay as they are.
pub(super) fn into_snapshot(snapshot: &mut Snapshot, manifests: Manifests) -> Expanded {
    let mut pods = Vec::new();
    let mut notes = manifests.notes;
    for object in manifests.objects {
        match object {
            Object::Pod(pod) => pods.push(*pod),
            Object::Workload(workload) => pods.extend(replicas(*workload)),
            Object::Claim(claim) => notes.extend(add_claim(snapshot, *claim)),
            Object::Template(object) => {
                replace(
                    &mut snapshot.resource_claim_templates,
                    snapshot::trimmed_template(*object),
                    |o| &o.metadata,
                );
            }
            Object::Class(object) => {
                replace(&mut snapshot.device_classes, snapshot::trimmed_class(*object), |o| {
                    &o.metadata
                });
            }
            Object::Node(object) => {
                replace(&mut snapshot.nodes, snapshot::trimmed_node(*object), |o| &o.metadata);
            }
            Object::Slice(object) => {
                replace(&mut snapshot.resource_slices, snapshot::trimmed_slice(*object), |o| {
                    &o.metadata
                });
            }
            Object::TaintRule(object) => {
                replace(&mut snapshot.device_taint_rules, snapshot::trimmed_rule(*object), |o| {
                    &o.metadata
                });
            }
        }
    }
    let mut adding = Adding { created: youngest(snapshot), snapshot, notes, pods: Vec::new() };
    pods.into_iter().for_each(|pod| adding.pod(pod));
    Expanded { pods: adding.pods, notes: adding.notes }
}

/// The pods that a workload makes, named after it with a number.
fn replicas(workload: Workload) -> impl Iterator<Item = Pod> {
    let Workload { namespace, name, replicas, template } = workload;
    (0..replicas).map(move |number| Pod {
        metadata: ObjectMeta {
            namespace: namespace.clone(),
            name: Some(format!("{name}-{number}")),
            ..ObjectMeta::default()
        },
        spec: template.spec.clone(),
        status: None,
    })
}

fn replace<K>(objects: &mut Vec<K>, object: K, metadata: impl Fn(&K) -> &ObjectMeta) {
    let id = |object: &K| (metadata(object).namespace.clone(), metadata(object).name.clone());
    objects.retain(|known| id(known) != id(&object));
    objects.push(object);
}

/// Adds a claim as the API server would make it, unless there is one of that name. Gives a note if
/// there is.
fn add_claim(snapshot: &mut Snapshot, claim: ResourceClaim) -> Option<String> {
    let ObjectMeta { namespace, name, .. } = &claim.metadata;
    let is_it = |known: &ResourceClaim| {
        known.metadata.namespace == *namespace && known.metadata.name == *name
    };
    if snapshot.resource_claims.iter().any(is_it) {
        let name = format!(
            "{}/{}",
            namespace.as_deref().unwrap_or_default(),
            name.as_deref().unwrap_or_default()
        );
        return Some(format!(
            "ResourceClaim {name} is in the cluster already and is used as it is there"
        ));
    }
    let uid = format!("simulated-claim-{}", snapshot.resource_claims.len());
    let metadata = ObjectMeta { uid: Some(uid), resource_version: None, ..claim.metadata };
    snapshot.resource_claims.push(snapshot::trimmed_claim(ResourceClaim {
        metadata,
        status: None,
        ..claim
    }));
    None
}

/// The moment after which the pods of the manifests are made.
fn youngest(snapshot: &Snapshot) -> Timestamp {
    let created = snapshot.pods.iter().filter_map(|pod| pod.metadata.creation_timestamp.as_ref());
    created.map(|time| time.0).max().unwrap_or_default().max(snapshot.taken_at)
}

/// Adds pods one after the other.
struct Adding<'s> {
    snapshot: &'s mut Snapshot,
    created: Timestamp,
    notes: Vec<String>,
    pods: Vec<(Namespace, PodName, bool)>,
}

impl Adding<'_> {
    fn pod(&mut self, pod: Pod) {
        let (namespace, name) =
            (pod.metadata.namespace.unwrap_or_default(), pod.metadata.name.unwrap_or_default());
        let (Ok(in_namespace), Ok(called)) = (Namespace::new(&namespace), PodName::new(&name))
        else {
            self.notes.push(format!(
                "Pod {namespace}/{name} has a name that the API server refuses; it is left out"
            ));
            return;
        };
        let is_it = |known: &Pod| {
            known.metadata.namespace.as_ref() == Some(&namespace)
                && known.metadata.name.as_ref() == Some(&name)
        };
        let exists = self.snapshot.pods.iter().any(is_it)
            || self.pods.iter().any(|(n, p, _)| (n, p) == (&in_namespace, &called));
        self.pods.push((in_namespace, called, exists));
        if exists {
            return;
        }
        let uid = format!("simulated-pod-{}", self.snapshot.pods.len());
        // One after the other, as kubectl makes them: age decides among equals.
        self.created =
            self.created.checked_add(SignedDuration::from_secs(1)).unwrap_or(self.created);
        let mut spec = pod.spec.unwrap_or_default();
        self.prioritise(&mut spec, &name);
        default_requests(&mut spec);
        let statuses = self.claims_from_templates(&spec, &namespace, &name, &uid);
        let pod = Pod {
            metadata: ObjectMeta {
                namespace: Some(namespace),
                name: Some(name),
                uid: Some(uid),
                creation_timestamp: Some(Time(self.created)),
                ..ObjectMeta::default()
            },
            spec: Some(spec),
            status: Some(k8s_openapi::api::core::v1::PodStatus {
                phase: Some("Pending".to_owned()),
                resource_claim_statuses: (!statuses.is_empty()).then_some(statuses),
                ..Default::default()
            }),
        };
        self.snapshot.pods.extend(snapshot::trimmed_pod(pod));
    }

    /// Admission resolves the class; only Kubernetes' own two are known here.
    fn prioritise(&mut self, spec: &mut PodSpec, pod: &str) {
        if spec.priority.is_some() {
            return;
        }
        spec.priority = match spec.priority_class_name.as_deref() {
            None => None,
            Some("system-cluster-critical") => Some(2_000_000_000),
            Some("system-node-critical") => Some(2_000_001_000),
            Some(class) => {
                let note = format!(
                    "Pod {pod}: PriorityClass {class} is not looked up; set spec.priority to plan it with one"
                );
                self.notes.push(note);
                None
            }
        };
    }

    /// Makes the pod's claims, as kube-controller-manager does. A template that is not there makes
    /// none.
    fn claims_from_templates(
        &mut self,
        spec: &PodSpec,
        namespace: &str,
        pod: &str,
        uid: &str,
    ) -> Vec<PodResourceClaimStatus> {
        let mut statuses = Vec::new();
        for entry in spec.resource_claims.iter().flatten() {
            let Some(template) = &entry.resource_claim_template_name else { continue };
            let is_it = |metadata: &ObjectMeta| {
                metadata.namespace.as_deref() == Some(namespace)
                    && metadata.name.as_ref() == Some(template)
            };
            let templates = &self.snapshot.resource_claim_templates;
            let Some(template) = templates.iter().find(|template| is_it(&template.metadata)) else {
                continue;
            };
            let name = format!("{pod}-{}", entry.name);
            let owner = OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Pod".to_owned(),
                name: pod.to_owned(),
                uid: uid.to_owned(),
                controller: Some(true),
                block_owner_deletion: None,
            };
            let claim = ResourceClaim {
                metadata: ObjectMeta {
                    namespace: Some(namespace.to_owned()),
                    name: Some(name.clone()),
                    uid: Some(format!("simulated-claim-{}", self.snapshot.resource_claims.len())),
                    owner_references: Some(vec![owner]),
                    ..ObjectMeta::default()
                },
                spec: template.spec.clone().unwrap_or_default().spec,
                status: None,
            };
            self.snapshot.resource_claims.push(claim);
            statuses.push(PodResourceClaimStatus {
                name: entry.name.clone(),
                resource_claim_name: Some(name),
            });
        }
        statuses
    }
}

/// What is not requested is requested as far as it is limited: the API server's default.
fn default_requests(spec: &mut PodSpec) {
    let containers = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
    containers.for_each(|container: &mut Container| {
        container.resources.iter_mut().for_each(request_limits)
    });
    spec.resources.iter_mut().for_each(request_limits);
}

fn request_limits(resources: &mut ResourceRequirements) {
    let Some(limits) = &resources.limits else { return };
    let requests = resources.requests.get_or_insert_default();
    for (name, amount) in limits {
        requests.entry(name.clone()).or_insert_with(|| amount.clone());
    }
}
