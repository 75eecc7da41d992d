//! The entries of the MutatingWebhookConfiguration.

use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhook, RuleWithOperations, ServiceReference, WebhookClientConfig,
};
use tessera_dialect::{AdmissionRule, Converter};

/// Path of the webhook, before the name of the task.
pub const CONVERT_PATH: &str = "/convert/";

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

    fn webhook(&self, rule: AdmissionRule, ca_bundle: Option<&str>) -> MutatingWebhook {
        MutatingWebhook {
            name: format!("{}.dialect.gpu.tessera.dev", rule.name),
            admission_review_versions: vec!["v1".to_owned()],
            client_config: WebhookClientConfig {
                ca_bundle: ca_bundle.map(|pem| ByteString(pem.as_bytes().to_vec())),
                service: Some(ServiceReference {
                    namespace: self.namespace.clone(),
                    name: self.name.clone(),
                    path: Some(format!("{CONVERT_PATH}{}", rule.task)),
                    port: Some(443),
                }),
                url: None,
            },
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
