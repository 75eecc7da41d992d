//! Adds objects of manifests to a snapshot, as the controllers of Kubernetes would.

use k8s_openapi::api::core::v1::{
    Container, Pod, PodResourceClaimStatus, PodSpec, ResourceRequirements,
};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use tessera_api::names::{Namespace, PodName};

use super::manifest::{ManifestError, Manifests, Object, Workload};
use super::priority::{self, UnknownClass};
use crate::snapshot::{self, Snapshot};

/// The pods that were added to the snapshot.
pub(super) struct Expanded {
    /// The pods of the manifests, in their order; true if the cluster has one of that name.
    pub(super) pods: Vec<(Namespace, PodName, bool)>,
    pub(super) notes: Vec<String>,
}

/// Adds the objects to the snapshot. Classes, templates, nodes, slices, quotas and taint rules
/// replace those of the same name; existing claims and pods are kept.
///
/// # Errors
/// [`ManifestError::PriorityClass`].
pub(super) fn into_snapshot(
    snapshot: &mut Snapshot,
    manifests: Manifests,
) -> Result<Expanded, ManifestError> {
    let mut pods = Vec::new();
    let mut notes = manifests.notes;
    let classes_are_known = snapshot.priority_classes.is_some();
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
            Object::Defaults(object) => {
                replace(&mut snapshot.gpu_defaults, snapshot::trimmed_defaults(*object), |o| {
                    &o.metadata
                });
            }
            Object::PriorityClass(object) => {
                let known = snapshot.priority_classes.get_or_insert_default();
                replace(known, snapshot::trimmed_priority_class(*object), |o| &o.metadata);
            }
            Object::Quota(object) => {
                replace(&mut snapshot.gpu_quotas, snapshot::trimmed_quota(*object), |o| {
                    &o.metadata
                });
            }
            Object::PodGroup(object) => {
                let known = snapshot.pod_groups.get_or_insert_default();
                replace(known, snapshot::trimmed_pod_group(*object), |o| &o.metadata);
            }
            Object::VolcanoPodGroup(object) => {
                let known = snapshot.volcano_pod_groups.get_or_insert_default();
                replace(known, snapshot::trimmed_volcano_pod_group(*object), |o| &o.metadata);
            }
            Object::TaintRule(object) => {
                replace(&mut snapshot.device_taint_rules, snapshot::trimmed_rule(*object), |o| {
                    &o.metadata
                });
            }
        }
    }
    let created = newest(snapshot);
    let mut added = AddedPods { snapshot, classes_are_known, created, notes, pods: Vec::new() };
    pods.into_iter().try_for_each(|pod| added.add(pod))?;
    Ok(Expanded { pods: added.pods, notes: added.notes })
}

/// Returns the pods of a workload, with its name and a number.
fn replicas(workload: Workload) -> impl Iterator<Item = Pod> {
    let Workload { namespace, name, replicas, template } = workload;
    let ObjectMeta { annotations, labels, .. } = template.metadata.unwrap_or_default();
    let owner = OwnerReference {
        name: name.clone(),
        uid: format!("simulated-{name}"),
        controller: Some(true),
        ..OwnerReference::default()
    };
    (0..replicas).map(move |number| Pod {
        metadata: ObjectMeta {
            namespace: namespace.clone(),
            name: Some(format!("{name}-{number}")),
            annotations: annotations.clone(),
            labels: labels.clone(),
            owner_references: Some(vec![owner.clone()]),
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

/// Adds a claim as the API server would. Returns a note if a claim of that name exists.
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
            "ResourceClaim {name} exists in the cluster; the existing one is used"
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

/// Returns the time after which the pods of the manifests are created.
fn newest(snapshot: &Snapshot) -> Timestamp {
    let created = snapshot.pods.iter().filter_map(|pod| pod.metadata.creation_timestamp.as_ref());
    created.map(|time| time.0).max().unwrap_or_default().max(snapshot.taken_at)
}

/// Adds pods to a snapshot, each one second after the other.
struct AddedPods<'s> {
    snapshot: &'s mut Snapshot,
    /// The PriorityClasses of the cluster were read. Those of the manifests are always known.
    classes_are_known: bool,
    created: Timestamp,
    notes: Vec<String>,
    pods: Vec<(Namespace, PodName, bool)>,
}

impl AddedPods<'_> {
    /// Adds a pod, and its claims.
    ///
    /// # Errors
    /// [`ManifestError::PriorityClass`].
    fn add(&mut self, pod: Pod) -> Result<(), ManifestError> {
        let (namespace, name) =
            (pod.metadata.namespace.unwrap_or_default(), pod.metadata.name.unwrap_or_default());
        let (Ok(in_namespace), Ok(called)) = (Namespace::new(&namespace), PodName::new(&name))
        else {
            self.notes.push(format!(
                "Pod {namespace}/{name} is skipped: the API server refuses its name"
            ));
            return Ok(());
        };
        let is_it = |known: &Pod| {
            known.metadata.namespace.as_ref() == Some(&namespace)
                && known.metadata.name.as_ref() == Some(&name)
        };
        let exists = self.snapshot.pods.iter().any(is_it)
            || self.pods.iter().any(|(n, p, _)| (n, p) == (&in_namespace, &called));
        if exists {
            self.pods.push((in_namespace, called, true));
            return Ok(());
        }
        let mut spec = pod.spec.unwrap_or_default();
        let classes = self.snapshot.priority_classes.as_deref().unwrap_or_default();
        if let Err(UnknownClass(class)) = priority::resolve(&mut spec, classes) {
            if self.classes_are_known {
                return Err(ManifestError::PriorityClass { pod: name, class });
            }
            self.notes.push(format!(
                "Pod {name}: PriorityClass {class} is ignored; set spec.priority to simulate it"
            ));
        }
        self.pods.push((in_namespace, called, false));
        let uid = format!("simulated-pod-{}", self.snapshot.pods.len());
        // kubectl creates them in this order: age decides among equals.
        self.created =
            self.created.checked_add(SignedDuration::from_secs(1)).unwrap_or(self.created);
        default_requests(&mut spec);
        let statuses = self.claims_from_templates(&spec, &namespace, &name, &uid);
        let pod = Pod {
            metadata: ObjectMeta {
                namespace: Some(namespace),
                name: Some(name),
                uid: Some(uid),
                creation_timestamp: Some(Time(self.created)),
                ..pod.metadata
            },
            spec: Some(spec),
            status: Some(k8s_openapi::api::core::v1::PodStatus {
                phase: Some("Pending".to_owned()),
                resource_claim_statuses: (!statuses.is_empty()).then_some(statuses),
                ..Default::default()
            }),
        };
        self.snapshot.pods.extend(snapshot::trimmed_pod(pod));
        Ok(())
    }

    /// Generates the pod's claims, as kube-controller-manager does. A missing template generates
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

/// Sets missing requests to the limits, the API server's default.
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
