//! Claim templates of pods that the admission webhook has converted (ADR 121).
//!
//! The webhook writes nothing: it names a template by its content. This part computes the content
//! again from the pod's annotation and creates the template, as its only writer. A template that no
//! pod names any more is deleted after [`GRACE`], so that a Job of many pods has it created once.
//!
//! kube-controller-manager makes a claim from any template of the name, so one that has another
//! content is replaced. The policy `tessera-templates` keeps other users from creating it.
//!
//! Work is proportional to the templates and pods that changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaimTemplate, ResourceClaimTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tessera_allocator::model::PodUid;
use tessera_api::events;
use tessera_api::names::Namespace;
use tessera_dialect::{CONVERTED_ANNOTATION, Converter, TEMPLATE_PREFIX};

use super::clock::Moment;
use super::effect::{Effect, TemplateChange, TemplateReference, TemplateWrite};
use super::event::TemplateOutcome;
use super::holds::{HoldReason, Holds, Subject};
use super::notices::Topic;
use super::{State, Step};

/// Time from the last pod that names a template to its deletion.
const GRACE: Duration = Duration::from_secs(600);

/// The templates with the reserved prefix, and the pods that name them.
#[derive(Debug, Default)]
pub(super) struct Templates {
    converter: Option<Arc<Converter>>,
    entries: BTreeMap<TemplateReference, Entry>,
    /// The templates that each pod names.
    named: BTreeMap<PodUid, BTreeSet<TemplateReference>>,
    /// The templates to decide about.
    changed: BTreeSet<TemplateReference>,
    /// The times at which templates are to be decided about again.
    due: BTreeSet<(Moment, TemplateReference)>,
}

/// A template that exists, or that pods name.
#[derive(Debug, Default)]
struct Entry {
    /// The pods that name it, each with the reason why its content is not known.
    pods: BTreeMap<PodUid, Option<String>>,
    /// The content with the defaults of the API server, from the annotation of a pod.
    wanted: Option<Arc<ResourceClaimTemplateSpec>>,
    existing: Option<Existing>,
    /// The UID of the one that this process created. It stays whatever the API server made of the
    /// content, since another creation would have the same result.
    created: Option<String>,
    is_being_written: bool,
    /// The last refusal of the API server.
    refusal: Option<String>,
    unnamed_since: Option<Moment>,
}

#[derive(Debug)]
struct Existing {
    uid: String,
    spec: ResourceClaimTemplateSpec,
}

/// A decision about a template.
#[derive(Debug)]
enum Decision {
    Nothing,
    /// Decide again at this time.
    Later(Moment),
    Write(TemplateChange),
    /// Tell the pods why there is no template.
    Explain,
}

impl Templates {
    pub(super) fn set_converter(&mut self, converter: Option<Arc<Converter>>) {
        self.converter = converter;
    }

    /// Takes in a pod. Returns true if a decision may change.
    pub(super) fn apply_pod(&mut self, pod: &Pod) -> bool {
        let (Some(uid), Some(namespace)) = (&pod.metadata.uid, &pod.metadata.namespace) else {
            return false;
        };
        let uid = PodUid::new(uid.as_str());
        let names = if has_ended(pod) { BTreeSet::new() } else { reserved_names(pod, namespace) };
        // The claims of a pod do not change, so its content is computed once.
        if self.named.get(&uid).map_or(names.is_empty(), |known| *known == names) {
            return false;
        }
        self.forget_pod(&uid);
        if names.is_empty() {
            return true;
        }
        let content = self.content(pod);
        for name in &names {
            let entry = self.entries.entry(name.clone()).or_default();
            entry.unnamed_since = None;
            let problem = match &content {
                Ok((own, spec)) if *own == name.name => {
                    entry.wanted.get_or_insert_with(|| Arc::clone(spec));
                    None
                }
                Ok((own, _)) => Some(format!(
                    "annotation {CONVERTED_ANNOTATION}: gives ResourceClaimTemplate {own} with the \
                     settings of the dialects as they are now, and the pod names {}; create the \
                     pod again, so that it is converted by these settings",
                    name.name
                )),
                Err(problem) => Some(problem.clone()),
            };
            entry.pods.insert(uid.clone(), problem);
        }
        self.changed.extend(names.iter().cloned());
        self.named.insert(uid, names);
        true
    }

    /// Takes in the deletion of a pod.
    pub(super) fn remove_pod(&mut self, pod: &Pod) {
        if let Some(uid) = pod.metadata.uid.as_deref() {
            self.forget_pod(&PodUid::new(uid));
        }
    }

    /// Returns true if the template exists, or pods name it.
    pub(super) fn contains(&self, template: &TemplateReference) -> bool {
        self.entries.contains_key(template)
    }

    fn forget_pod(&mut self, pod: &PodUid) {
        let Some(names) = self.named.remove(pod) else { return };
        for name in &names {
            if let Some(entry) = self.entries.get_mut(name) {
                entry.pods.remove(pod);
            }
        }
        self.changed.extend(names);
    }

    /// Returns the name and content of the template of a converted pod, or the reason why it has
    /// none.
    fn content(&self, pod: &Pod) -> Result<(String, Arc<ResourceClaimTemplateSpec>), String> {
        let Some(converter) = &self.converter else {
            return Err(
                "the pod was converted from a dialect, and the controller has no settings \
                        of dialects now; set the chart's `dialects`, or create the pod with a \
                        claim of your own"
                    .to_owned(),
            );
        };
        let object = serde_json::to_value(pod).map_err(|error| error.to_string())?;
        match converter.template(&object).map_err(|error| error.to_string())? {
            Some(template) => {
                let spec = serde_json::from_value(template.spec);
                let spec = with_defaults(&spec.map_err(|error| error.to_string())?);
                Ok((template.name, Arc::new(spec)))
            }
            None => Err(format!("annotation {CONVERTED_ANNOTATION}: no container has a GPU")),
        }
    }

    /// Takes in a template. Returns true if a decision may change.
    pub(super) fn apply_template(&mut self, object: &ResourceClaimTemplate) -> bool {
        let (Some(reference), Some(uid)) = (reserved(object), &object.metadata.uid) else {
            return false;
        };
        let existing = Existing { uid: uid.clone(), spec: spec_of(object) };
        self.entries.entry(reference.clone()).or_default().existing = Some(existing);
        self.changed.insert(reference)
    }

    /// Takes in the deletion of a template. Returns true if a decision may change.
    pub(super) fn remove_template(&mut self, object: &ResourceClaimTemplate) -> bool {
        let Some(reference) = reserved(object) else { return false };
        let Some(entry) = self.entries.get_mut(&reference) else { return false };
        // A watch may deliver the end of one that has been replaced.
        entry.existing.take_if(|existing| Some(&existing.uid) == object.metadata.uid.as_ref());
        self.changed.insert(reference)
    }

    /// Takes in the end of a write. Returns true if it was stored.
    fn ended(&mut self, template: &TemplateReference, outcome: TemplateOutcome) -> bool {
        let Some(entry) = self.entries.get_mut(template) else { return false };
        entry.is_being_written = false;
        self.changed.insert(template.clone());
        let is_stored = matches!(outcome, TemplateOutcome::Created(_) | TemplateOutcome::Gone);
        entry.refusal = None;
        match outcome {
            TemplateOutcome::Created(object) => {
                let uid = object.metadata.uid.clone().unwrap_or_default();
                entry.created = Some(uid.clone());
                entry.existing = Some(Existing { uid, spec: spec_of(&object) });
            }
            TemplateOutcome::Gone => entry.existing = None,
            TemplateOutcome::Refused { message } => entry.refusal = Some(message),
            TemplateOutcome::Exists | TemplateOutcome::Failed => {}
        }
        is_stored
    }

    /// Returns the next time at which a template is to be decided about.
    fn next_due(&self) -> Option<Moment> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Decides about the templates that have changed, or whose time has come.
    fn decide(&mut self, holds: &Holds, now: Moment) -> Vec<(TemplateReference, Decision)> {
        while let Some((at, _)) = self.due.first()
            && *at <= now
            && let Some((_, template)) = self.due.pop_first()
        {
            self.changed.insert(template);
        }
        let mut decisions = Vec::new();
        for template in std::mem::take(&mut self.changed) {
            let Some(entry) = self.entries.get_mut(&template) else { continue };
            let held_until = holds.last_end(&Subject::template(&template), now);
            let decision = entry.decide(held_until, now);
            match &decision {
                Decision::Later(at) => {
                    self.due.insert((*at, template.clone()));
                }
                Decision::Write(_) => entry.is_being_written = true,
                Decision::Explain => {}
                Decision::Nothing if entry.is_empty() => {
                    self.entries.remove(&template);
                }
                Decision::Nothing => {}
            }
            decisions.push((template, decision));
        }
        decisions
    }

    /// Returns the pods without the template, and the reason of each.
    fn explanations(&self, template: &TemplateReference) -> Vec<(PodUid, String)> {
        let Some(entry) = self.entries.get(template) else { return Vec::new() };
        let refused = |message: &String| {
            format!("the API server refuses ResourceClaimTemplate {}: {message}", template.name)
        };
        let refusal = entry.refusal.as_ref().map(refused);
        let reason = |(pod, problem): (&PodUid, &Option<String>)| {
            Some((pod.clone(), refusal.clone().or_else(|| problem.clone())?))
        };
        entry.pods.iter().filter_map(reason).collect()
    }
}

impl Entry {
    fn is_empty(&self) -> bool {
        self.pods.is_empty() && self.existing.is_none() && !self.is_being_written
    }

    fn decide(&mut self, held_until: Option<Moment>, now: Moment) -> Decision {
        if self.is_being_written {
            return Decision::Nothing;
        }
        if self.pods.is_empty() {
            self.wanted = None;
        }
        let change = match (&self.existing, &self.wanted) {
            (None, Some(spec)) => TemplateChange::Create(Arc::clone(spec)),
            (Some(existing), Some(spec))
                if self.created.as_ref() != Some(&existing.uid) && existing.spec != **spec =>
            {
                TemplateChange::Delete(existing.uid.clone())
            }
            (Some(existing), None) if self.pods.is_empty() => {
                let end = *self.unnamed_since.get_or_insert(now) + GRACE;
                if now < end {
                    return Decision::Later(end);
                }
                TemplateChange::Delete(existing.uid.clone())
            }
            (Some(_), _) => return Decision::Nothing,
            (None, None) if self.pods.is_empty() => return Decision::Nothing,
            (None, None) => return Decision::Explain,
        };
        match held_until {
            Some(at) => Decision::Later(at),
            None => Decision::Write(change),
        }
    }
}

impl Step<'_> {
    /// Creates the templates that pods wait for, and deletes those that no pod names.
    pub(super) fn write_templates(&mut self) {
        let State { templates, holds, .. } = &mut *self.state;
        for (template, decision) in templates.decide(holds, self.now) {
            match decision {
                Decision::Write(change) => {
                    let TemplateReference { namespace, name } = &template;
                    let is_creation = matches!(change, TemplateChange::Create(_));
                    tracing::debug!(%namespace, name, is_creation, "writing a claim template");
                    self.effects.push(Effect::WriteTemplate(TemplateWrite { template, change }));
                }
                Decision::Explain | Decision::Later(_) => {
                    for (pod, reason) in self.state.templates.explanations(&template) {
                        let event = events::CLAIM_TEMPLATE_NOT_CREATED;
                        // No further step reports it.
                        self.notify_incident(&pod, Topic::Pod, event, reason, None);
                    }
                }
                Decision::Nothing => {}
            }
        }
        self.wake_at(self.state.templates.next_due());
    }

    /// Takes in the end of a write of a template.
    pub(super) fn absorb_template(
        &mut self,
        template: &TemplateReference,
        outcome: TemplateOutcome,
    ) {
        let State { templates, holds, .. } = &mut *self.state;
        let subject = Subject::template(template);
        if templates.ended(template, outcome) {
            holds.end_of(&subject, HoldReason::TemplateFailed);
            self.figures.template_writes += 1;
        } else {
            holds.hold(subject, HoldReason::TemplateFailed, self.now);
            self.figures.template_errors += 1;
        }
    }
}

fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Returns the templates of the reserved prefix that the pod names.
fn reserved_names(pod: &Pod, namespace: &str) -> BTreeSet<TemplateReference> {
    let Ok(namespace) = Namespace::new(namespace) else { return BTreeSet::new() };
    let claims = pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten());
    let names = claims.filter_map(|claim| claim.resource_claim_template_name.as_ref());
    let reserved = names.filter(|name| name.starts_with(TEMPLATE_PREFIX));
    let reference =
        |name: &String| TemplateReference { namespace: namespace.clone(), name: name.clone() };
    reserved.map(reference).collect()
}

/// Returns the name of a template of the reserved prefix; `None` for others.
fn reserved(object: &ResourceClaimTemplate) -> Option<TemplateReference> {
    let name = object.metadata.name.clone().filter(|name| name.starts_with(TEMPLATE_PREFIX))?;
    let namespace = Namespace::new(object.metadata.namespace.as_deref()?).ok()?;
    Some(TemplateReference { namespace, name })
}

fn spec_of(object: &ResourceClaimTemplate) -> ResourceClaimTemplateSpec {
    object.spec.as_ref().map(with_defaults).unwrap_or_default()
}

/// Returns the content with the defaults that the API server sets
/// (`pkg/apis/resource/v1/defaults.go`).
fn with_defaults(spec: &ResourceClaimTemplateSpec) -> ResourceClaimTemplateSpec {
    let mut spec = spec.clone();
    // A struct of Go without a value is written as {}.
    spec.metadata.take_if(|metadata| *metadata == ObjectMeta::default());
    let devices = spec.spec.iter_mut().filter_map(|claim| claim.devices.as_mut());
    let requests = devices.flat_map(|devices| devices.requests.iter_mut().flatten());
    for exact in requests.filter_map(|request| request.exactly.as_mut()) {
        let mode = exact.allocation_mode.get_or_insert_with(|| "ExactCount".to_owned());
        if mode == "ExactCount" {
            exact.count.get_or_insert(1);
        }
    }
    spec
}
