//! The object of a placeholder pod.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Affinity, Capabilities, Container, NodeAffinity, NodeSelector, NodeSelectorRequirement,
    NodeSelectorTerm, Pod, PodAffinityTerm, PodAntiAffinity, PodSecurityContext, PodSpec,
    ResourceRequirements, SeccompProfile, SecurityContext, Toleration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use tessera_api::names::{
    CONTROLLER_FIELD_MANAGER, HOST_NAME_LABEL, NO_SCHEDULE, NODE_GROUP_LABEL, PodName,
};

use crate::node_groups::{NodeGroup, NodeGroups};

/// A user that the image need not know. The Pod Security Standard `restricted` wants one.
const USER: i64 = 65_535;

/// Returns the pod `name` that fits on a new node of the group only: not on a node with one of the
/// `existing` host names, and not beside another placeholder of the group. It has no claims, so an
/// autoscaler that cannot find GPUs for claims finds a node for it.
pub(super) fn placeholder(
    settings: &NodeGroups,
    group: &NodeGroup,
    name: &PodName,
    existing: Vec<String>,
) -> Pod {
    let labels: BTreeMap<String, String> = [
        (NODE_GROUP_LABEL.to_owned(), group.name.to_string()),
        ("app.kubernetes.io/managed-by".to_owned(), CONTROLLER_FIELD_MANAGER.to_owned()),
    ]
    .into();
    Pod {
        metadata: ObjectMeta {
            name: Some(name.to_string()),
            namespace: Some(settings.namespace.to_string()),
            labels: Some(labels),
            ..ObjectMeta::default()
        },
        spec: Some(PodSpec {
            affinity: Some(affinity(group, existing)),
            automount_service_account_token: Some(false),
            containers: vec![container(settings)],
            enable_service_links: Some(false),
            node_selector: Some(group.node_selector.clone()),
            priority_class_name: Some(settings.priority_class_name.clone()),
            security_context: Some(PodSecurityContext {
                run_as_non_root: Some(true),
                run_as_user: Some(USER),
                seccomp_profile: Some(SeccompProfile {
                    type_: "RuntimeDefault".to_owned(),
                    ..SeccompProfile::default()
                }),
                ..PodSecurityContext::default()
            }),
            termination_grace_period_seconds: Some(0),
            // GPU nodes are tainted, as a rule.
            tolerations: Some(vec![Toleration {
                operator: Some("Exists".to_owned()),
                effect: Some(NO_SCHEDULE.to_owned()),
                ..Toleration::default()
            }]),
            ..PodSpec::default()
        }),
        ..Pod::default()
    }
}

fn affinity(group: &NodeGroup, existing: Vec<String>) -> Affinity {
    let is_new = NodeSelectorRequirement {
        key: HOST_NAME_LABEL.to_owned(),
        operator: "NotIn".to_owned(),
        values: Some(existing),
    };
    let term = NodeSelectorTerm { match_expressions: Some(vec![is_new]), match_fields: None };
    let own_label = [(NODE_GROUP_LABEL.to_owned(), group.name.to_string())];
    let beside = PodAffinityTerm {
        label_selector: Some(LabelSelector {
            match_labels: Some(own_label.into()),
            ..LabelSelector::default()
        }),
        topology_key: HOST_NAME_LABEL.to_owned(),
        ..PodAffinityTerm::default()
    };
    Affinity {
        node_affinity: Some(NodeAffinity {
            required_during_scheduling_ignored_during_execution: Some(NodeSelector {
                node_selector_terms: vec![term],
            }),
            ..NodeAffinity::default()
        }),
        pod_anti_affinity: Some(PodAntiAffinity {
            required_during_scheduling_ignored_during_execution: Some(vec![beside]),
            ..PodAntiAffinity::default()
        }),
        ..Affinity::default()
    }
}

fn container(settings: &NodeGroups) -> Container {
    let amounts = [("cpu", "1m"), ("memory", "8Mi")];
    let amounts: BTreeMap<String, Quantity> =
        amounts.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned()))).into();
    Container {
        name: "wait".to_owned(),
        image: Some(settings.image.clone()),
        resources: Some(ResourceRequirements {
            requests: Some(amounts.clone()),
            limits: Some(amounts.into_iter().filter(|(name, _)| name == "memory").collect()),
            ..ResourceRequirements::default()
        }),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            capabilities: Some(Capabilities {
                drop: Some(vec!["ALL".to_owned()]),
                ..Capabilities::default()
            }),
            read_only_root_filesystem: Some(true),
            ..SecurityContext::default()
        }),
        ..Container::default()
    }
}
