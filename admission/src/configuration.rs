//! The entries of the webhook configurations.

use k8s_openapi::ByteString;
use k8s_openapi::Resource as _;
use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MutatingWebhook, RuleWithOperations, ServiceReference, ValidatingWebhook,
    WebhookClientConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use tessera_api::defaults::GpuDefaults;
use tessera_api::names::{DRIVER_NAME, VALIDATION_LABEL};
use tessera_dialect::{AdmissionRule, Converter};

/// Path of the webhook, before the name of the task.
pub const CONVERT_PATH: &str = "/convert/";

/// Path of the validation of GpuConfigs.
pub const VALIDATE_PATH: &str = "/validate";

/// Time that kube-apiserver waits for a validation, in seconds.
const VALIDATION_TIMEOUT_SECONDS: i32 = 5;

/// Time that kube-apiserver waits for an answer, in seconds. A pod takes about a millisecond; the
/// rest is for a replica that starts, or a connection that is lost.
const TIMEOUT_SECONDS: i32 = 10;

/// The Service of the webhook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookService {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl WebhookService {
    /// Returns the DNS name that kube-apiserver verifies.
    #[must_use]
    pub fn dns_name(&self) -> String {
        format!("{}.{}.svc", self.name, self.namespace)
    }

    /// Returns the entries that send the pods of the converter's rules to the service.
    ///
    /// `ca_bundle` is in PEM; without one the entries have none, so that the field stays that of
    /// another writer.
    #[must_use]
    pub fn webhooks(&self, converter: &Converter, ca_bundle: Option<&str>) -> Vec<MutatingWebhook> {
        let entry = |rule| self.webhook(rule, ca_bundle);
        converter.admission_rules().into_iter().map(entry).collect()
    }

    /// Returns the entry of the ValidatingWebhookConfiguration that sends objects with a GpuConfig.
    ///
    /// `ca_bundle` as in [`webhooks`](Self::webhooks). A change that leaves the spec as it is does
    /// not pass the webhook, so that objects from before stay writable. Nor does a claim that
    /// Kubernetes makes from a template, whose config was checked: 500 pods of other systems made
    /// 500 such calls.
    #[must_use]
    pub fn validating_webhook(&self, ca_bundle: Option<&str>) -> ValidatingWebhook {
        let configs = "(request.kind.kind == 'DeviceClass' ? object.spec.?config : \
                       request.kind.kind == 'ResourceClaim' ? object.spec.?devices.?config : \
                       object.spec.?spec.?devices.?config).orValue([])";
        let is_ours = format!("config.?opaque.?driver.orValue('') == '{DRIVER_NAME}'");
        let condition =
            |name: &str, expression: String| MatchCondition { name: name.to_owned(), expression };
        ValidatingWebhook {
            name: "gpuconfig.gpu.tessera.dev".to_owned(),
            admission_review_versions: vec!["v1".to_owned()],
            client_config: self.client_config(VALIDATE_PATH.to_owned(), ca_bundle),
            // The plan refuses a wrong config too, with the event InvalidConfig.
            failure_policy: Some("Ignore".to_owned()),
            match_conditions: Some(vec![
                condition(
                    "has-config",
                    format!(
                        "request.kind.kind == 'GpuDefaults' || {configs}.exists(config, {is_ours})"
                    ),
                ),
                condition("is-no-copy", format!("!({IS_COPY})")),
                condition(
                    "spec-changes",
                    "request.operation == 'CREATE' || object.spec != oldObject.spec".to_owned(),
                ),
            ]),
            match_policy: Some("Equivalent".to_owned()),
            namespace_selector: Some(LabelSelector {
                match_expressions: Some(vec![LabelSelectorRequirement {
                    key: VALIDATION_LABEL.to_owned(),
                    operator: "NotIn".to_owned(),
                    values: Some(vec!["none".to_owned()]),
                }]),
                match_labels: None,
            }),
            object_selector: Some(LabelSelector::default()),
            rules: Some(vec![
                written(
                    ("resource.k8s.io", "v1"),
                    &["deviceclasses", "resourceclaims", "resourceclaimtemplates"],
                ),
                written(
                    (GpuDefaults::GROUP, GpuDefaults::VERSION),
                    &[GpuDefaults::URL_PATH_SEGMENT],
                ),
            ]),
            side_effects: "None".to_owned(),
            timeout_seconds: Some(VALIDATION_TIMEOUT_SECONDS),
        }
    }

    fn client_config(&self, path: String, ca_bundle: Option<&str>) -> WebhookClientConfig {
        WebhookClientConfig {
            ca_bundle: ca_bundle.map(|pem| ByteString(pem.as_bytes().to_vec())),
            service: Some(ServiceReference {
                namespace: self.namespace.clone(),
                name: self.name.clone(),
                path: Some(path),
                port: Some(443),
            }),
            url: None,
        }
    }

    fn webhook(&self, rule: AdmissionRule, ca_bundle: Option<&str>) -> MutatingWebhook {
        MutatingWebhook {
            name: format!("{}.dialect.gpu.tessera.dev", rule.name),
            admission_review_versions: vec!["v1".to_owned()],
            client_config: self.client_config(format!("{CONVERT_PATH}{}", rule.task), ca_bundle),
            // A pod that is not converted would be pending for ever, or, beside the old system, run
            // on its GPUs.
            failure_policy: Some("Fail".to_owned()),
            match_conditions: Some(rule.match_conditions),
            match_policy: Some("Equivalent".to_owned()),
            namespace_selector: Some(rule.namespace_selector),
            object_selector: Some(rule.object_selector),
            // Another webhook may add names to a pod that this one has left.
            reinvocation_policy: Some("IfNeeded".to_owned()),
            rules: Some(vec![RuleWithOperations {
                api_groups: Some(vec![String::new()]),
                api_versions: Some(vec!["v1".to_owned()]),
                operations: Some(vec!["CREATE".to_owned()]),
                resources: Some(vec!["pods".to_owned()]),
                scope: Some("Namespaced".to_owned()),
            }]),
            side_effects: "None".to_owned(),
            timeout_seconds: Some(TIMEOUT_SECONDS),
        }
    }
}

/// True for claims that kube-controller-manager makes from templates, with a service account of its
/// own and without.
const IS_COPY: &str = "request.kind.kind == 'ResourceClaim' && request.userInfo.username in \
                       ['system:serviceaccount:kube-system:resource-claim-controller', \
                       'system:kube-controller-manager']";

/// Returns the rule for writes of these resources.
fn written((group, version): (&str, &str), resources: &[&str]) -> RuleWithOperations {
    RuleWithOperations {
        api_groups: Some(vec![group.to_owned()]),
        api_versions: Some(vec![version.to_owned()]),
        operations: Some(vec!["CREATE".to_owned(), "UPDATE".to_owned()]),
        resources: Some(resources.iter().map(|&name| name.to_owned()).collect()),
        scope: Some("*".to_owned()),
    }
}
