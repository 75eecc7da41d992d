//! Rules by which kube-apiserver sends pods to the admission webhook, and the data of the policy
//! that guards it.
//!
//! Selectors and CEL expressions decide the dialect of a pod, so that the webhook reads no
//! namespace and a pod without a handled name is created while the webhook does not run. Each rule
//! is one entry of a MutatingWebhookConfiguration, and names what the webhook has to do.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::admissionregistration::v1::MatchCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use serde_json::Value;
use tessera_api::names::MIRROR_ANNOTATION;

use crate::convert::{Converter, SYSTEM_NAMESPACE};
use crate::dialects::{Read, Reader, Trigger};
use crate::name::{DIALECT_LABEL, Dialect, NO_DIALECT};

/// Label with the name of a namespace, which kube-apiserver sets.
const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Action of the webhook on the pods of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdmissionTask {
    /// Converts them from this dialect.
    Convert(Dialect),
    /// Refuses them: the label of the pod or its namespace names no dialect of the settings.
    RefuseLabel,
}

/// Name of the task that refuses.
const REFUSE_LABEL: &str = "unknown-dialect";

impl fmt::Display for AdmissionTask {
    /// A segment of a URL path.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Convert(dialect) => dialect.name(),
            Self::RefuseLabel => REFUSE_LABEL,
        })
    }
}

impl AdmissionTask {
    /// Returns the task of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            REFUSE_LABEL => Some(Self::RefuseLabel),
            _ => Dialect::named(name).map(Self::Convert),
        }
    }
}

/// Pods that are sent to the webhook.
#[derive(Debug, Clone, PartialEq)]
pub struct AdmissionRule {
    /// Name, a DNS label that no other rule of the settings has.
    pub name: String,
    /// Action of the webhook.
    pub task: AdmissionTask,
    /// Namespaces of the pods.
    pub namespace_selector: LabelSelector,
    /// Labels of the pods.
    pub object_selector: LabelSelector,
    /// CEL expressions that are all true for the pods.
    pub match_conditions: Vec<MatchCondition>,
}

impl Converter {
    /// Returns the rules. At most one of them matches a pod, unless the pod names resources of
    /// several default dialects.
    #[must_use]
    pub fn admission_rules(&self) -> Vec<AdmissionRule> {
        let mut rules = Vec::new();
        for read in self.readers() {
            let dialect = read.dialect();
            let rule = |prefix: &str, namespaces: Vec<_>, pods: Vec<_>| {
                let opt_out = Reader::new(read).opt_outs();
                let excluded = || opt_out.iter().map(|(name, value)| not_in(name, &[value]));
                AdmissionRule {
                    name: format!("{prefix}-{dialect}"),
                    task: AdmissionTask::Convert(dialect),
                    namespace_selector: selector(namespaces.into_iter().chain(excluded())),
                    object_selector: LabelSelector {
                        match_expressions: Some(pods.into_iter().chain(excluded()).collect()),
                        match_labels: None,
                    },
                    match_conditions: conditions(&read.triggers(), &Reader::new(read).schedulers()),
                }
            };
            let own = || is_in(DIALECT_LABEL, &[dialect.name()]);
            rules.push(rule("pod", vec![], vec![own()]));
            rules.push(rule("namespace", vec![own()], vec![absent(DIALECT_LABEL)]));
            if self.is_default(dialect) {
                let unlabelled = || vec![absent(DIALECT_LABEL)];
                rules.push(rule("default", unlabelled(), unlabelled()));
            }
        }
        let mut valid: Vec<&str> = self.readers().map(|read| read.dialect().name()).collect();
        valid.push(NO_DIALECT);
        let unknown = || vec![exists(DIALECT_LABEL), not_in(DIALECT_LABEL, &valid)];
        let triggers: Vec<Trigger> = self.triggers().into_iter().collect();
        let refusing = |name: &str, namespaces: Vec<_>, pods: Vec<_>| AdmissionRule {
            name: name.to_owned(),
            task: AdmissionTask::RefuseLabel,
            namespace_selector: selector(namespaces.into_iter()),
            object_selector: LabelSelector { match_expressions: Some(pods), match_labels: None },
            match_conditions: conditions(&triggers, &[]),
        };
        rules.push(refusing("pod-unknown", vec![], unknown()));
        rules.push(refusing("namespace-unknown", unknown(), vec![absent(DIALECT_LABEL)]));
        rules
    }

    /// Returns the data of the ConfigMap that parametrizes the guard, the policy for pods that the
    /// webhook should have converted. Lists are separated by commas.
    ///
    /// | key | value |
    /// |---|---|
    /// | `default` | dialects of namespaces without the label |
    /// | `DIALECT.resources` | resources by which a pod asks for GPUs |
    /// | `DIALECT.annotations` | annotations by which it does |
    /// | `DIALECT.schedulers` | schedulers whose pods are converted; empty: all |
    /// | `DIALECT.optOut` | labels `NAME=VALUE` of pods and namespaces that opt out |
    #[must_use]
    pub fn guard_data(&self) -> BTreeMap<String, String> {
        let dialects = self.readers().map(Read::dialect);
        let default: Vec<&str> =
            dialects.filter(|dialect| self.is_default(*dialect)).map(Dialect::name).collect();
        let mut data = BTreeMap::from([("default".to_owned(), default.join(","))]);
        for read in self.readers() {
            let dialect = read.dialect();
            let (triggers, reader) = (read.triggers(), Reader::new(read));
            let opt_out: Vec<String> =
                reader.opt_outs().iter().map(|(name, value)| format!("{name}={value}")).collect();
            let lists = [
                ("resources", resources(&triggers).join(",")),
                ("annotations", annotations(&triggers).join(",")),
                ("schedulers", reader.schedulers().join(",")),
                ("optOut", opt_out.join(",")),
            ];
            data.extend(lists.map(|(list, value)| (format!("{dialect}.{list}"), value)));
        }
        data
    }
}

/// Returns the conditions of pods with one of the names, of these schedulers; empty: of all.
fn conditions(triggers: &[Trigger], schedulers: &[&str]) -> Vec<MatchCondition> {
    let mut conditions =
        vec![condition("names-gpus", names(triggers)), condition("not-mirror", is_no_mirror_pod())];
    if !schedulers.is_empty() {
        let scheduler = "has(object.spec.schedulerName) ? object.spec.schedulerName : ''";
        let expression = format!("({scheduler}) in {}", list(schedulers));
        conditions.push(condition("of-its-scheduler", expression));
    }
    conditions
}

fn condition(name: &str, expression: String) -> MatchCondition {
    MatchCondition { name: name.to_owned(), expression }
}

fn resources(triggers: &[Trigger]) -> Vec<&str> {
    let name = |trigger: &'_ Trigger| matches!(trigger, Trigger::Resource(_));
    triggers.iter().filter(|trigger| name(trigger)).map(Trigger::name).collect()
}

fn annotations(triggers: &[Trigger]) -> Vec<&str> {
    let name = |trigger: &'_ Trigger| matches!(trigger, Trigger::Annotation(_));
    triggers.iter().filter(|trigger| name(trigger)).map(Trigger::name).collect()
}

/// Returns an expression that is true for pods with one of the names.
fn names(triggers: &[Trigger]) -> String {
    let (resources, annotations) = (resources(triggers), annotations(triggers));
    let mut parts = Vec::new();
    if !resources.is_empty() {
        let list = list(&resources);
        let amounts = |field: &str| {
            format!(
                "(has(c.resources.{field}) && c.resources.{field}.exists(name, name in {list}))"
            )
        };
        let of_container =
            format!("has(c.resources) && ({} || {})", amounts("limits"), amounts("requests"));
        parts.push(format!("object.spec.containers.exists(c, {of_container})"));
        parts.push(format!(
            "(has(object.spec.initContainers) && object.spec.initContainers.exists(c, {of_container}))"
        ));
    }
    if !annotations.is_empty() {
        let list = list(&annotations);
        parts.push(format!(
            "(has(object.metadata.annotations) && object.metadata.annotations.exists(name, name in {list}))"
        ));
    }
    if parts.is_empty() { "false".to_owned() } else { parts.join(" || ") }
}

fn is_no_mirror_pod() -> String {
    format!(
        "!has(object.metadata.annotations) || !('{MIRROR_ANNOTATION}' in object.metadata.annotations)"
    )
}

/// Returns the texts as a list in CEL, whose escapes include those of JSON.
fn list(texts: &[&str]) -> String {
    Value::from(texts.to_vec()).to_string()
}

/// Returns a selector of namespaces with these labels, other than `kube-system`.
fn selector(requirements: impl Iterator<Item = LabelSelectorRequirement>) -> LabelSelector {
    let system = not_in(NAMESPACE_NAME_LABEL, &[SYSTEM_NAMESPACE]);
    let all = std::iter::once(system).chain(requirements);
    LabelSelector { match_expressions: Some(all.collect()), match_labels: None }
}

fn requirement(key: &str, operator: &str, values: Option<&[&str]>) -> LabelSelectorRequirement {
    LabelSelectorRequirement {
        key: key.to_owned(),
        operator: operator.to_owned(),
        values: values.map(|values| values.iter().map(|&value| value.to_owned()).collect()),
    }
}

fn is_in(key: &str, values: &[&str]) -> LabelSelectorRequirement {
    requirement(key, "In", Some(values))
}

/// Also true for objects without the label.
fn not_in(key: &str, values: &[&str]) -> LabelSelectorRequirement {
    requirement(key, "NotIn", Some(values))
}

fn exists(key: &str) -> LabelSelectorRequirement {
    requirement(key, "Exists", None)
}

fn absent(key: &str) -> LabelSelectorRequirement {
    requirement(key, "DoesNotExist", None)
}
