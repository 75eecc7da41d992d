//! The patch of a converted pod: removes the names of the dialect, adds the claim.

use json_patch::jsonptr::{PointerBuf, Token};
use json_patch::{AddOperation, Patch, PatchOperation, RemoveOperation, ReplaceOperation};
use serde_json::{Value, json};

use crate::claim::Requests;
use crate::dialects::Names;
use crate::original::{CONVERTED_ANNOTATION, Original};
use crate::pod::{Amounts, Container, Pod};

/// Scheduler of pods whose own one is gone.
const DEFAULT_SCHEDULER: &str = "default-scheduler";
/// Name of the claim in the pod, unless it is taken.
const CLAIM_NAME: &str = "gpu";

/// Operations in the order of the pod's fields.
#[derive(Debug, Default)]
struct Operations(Vec<PatchOperation>);

/// Changes of a pod.
#[derive(Debug)]
pub(crate) struct Changes<'c> {
    pub(crate) pod: &'c Pod<'c>,
    pub(crate) names: &'c Names,
    /// The template and the requests of each container; `None` if no container has a GPU.
    pub(crate) claim: Option<(&'c str, &'c Requests)>,
    /// Variables to add: container, name, value.
    pub(crate) environment: &'c [(usize, String, String)],
    pub(crate) replaces_scheduler: bool,
    /// Content of the annotation; `None` for manifests, which keep nothing.
    pub(crate) original: Option<&'c Original>,
    /// Keys of taints that the pod shall tolerate.
    pub(crate) tolerated: &'c [String],
}

impl Changes<'_> {
    /// Returns the patch.
    pub(crate) fn patch(&self) -> Patch {
        let mut operations = Operations::default();
        self.patch_annotations(&mut operations);
        let claim = self.claim.map(|(template, _)| self.patch_claims(template, &mut operations));
        if self.replaces_scheduler && self.pod.has_scheduler() {
            operations.replace(&["spec", "schedulerName"], DEFAULT_SCHEDULER.into());
        }
        self.patch_tolerations(&mut operations);
        for (index, container) in self.pod.containers.iter().enumerate() {
            self.patch_container(index, container, claim.as_deref(), &mut operations);
        }
        Patch(operations.0)
    }

    fn patch_annotations(&self, operations: &mut Operations) {
        let path = ["metadata", "annotations"];
        let gone = self.names.annotations.iter().chain(&self.names.written);
        let gone: Vec<_> = gone.filter(|name| self.pod.annotation(name).is_some()).collect();
        if self.original.is_none() && !gone.is_empty() && gone.len() == self.pod.annotations() {
            return operations.remove(&path);
        }
        gone.iter().for_each(|name| operations.remove(&[&path[..], &[name]].concat()));
        let Some(original) = self.original else { return };
        let kept = serde_json::to_string(original).unwrap_or_default();
        if self.pod.has_annotations() {
            operations.add(&[&path[..], &[CONVERTED_ANNOTATION]].concat(), kept.into());
        } else {
            operations.add(&path, json!({CONVERTED_ANNOTATION: kept}));
        }
    }

    fn patch_tolerations(&self, operations: &mut Operations) {
        let keys = self.pod.tolerated_keys();
        let present = keys.as_deref().unwrap_or_default();
        let missing = self.tolerated.iter().filter(|key| !present.contains(&key.as_str()));
        let tolerations =
            missing.map(|key| json!({"key": key, "operator": "Exists", "effect": "NoSchedule"}));
        add_to_list(&["spec", "tolerations"], keys.is_some(), tolerations, operations);
    }

    /// Adds the claim to the pod and returns its name there.
    fn patch_claims(&self, template: &str, operations: &mut Operations) -> String {
        let taken = self.pod.claim_names();
        let name = free_claim_name(taken.as_deref().unwrap_or_default());
        let claim = json!({"name": name, "resourceClaimTemplateName": template});
        match taken {
            None => operations.add(&["spec", "resourceClaims"], json!([claim])),
            Some(_) => operations.add(&["spec", "resourceClaims", "-"], claim),
        }
        name
    }

    fn patch_container(
        &self,
        index: usize,
        container: &Container<'_>,
        claim: Option<&str>,
        operations: &mut Operations,
    ) {
        let number = container.index.to_string();
        let root = ["spec", container.list, &number];
        for amounts in Amounts::BOTH {
            let Some(present) = container.amounts(amounts) else { continue };
            let is_ours = |name: &&String| self.names.resources.contains(name);
            let path = [&root[..], &["resources", amounts.field()]].concat();
            let ours: Vec<_> = present.keys().filter(is_ours).collect();
            if !ours.is_empty() && ours.len() == present.len() {
                operations.remove(&path);
                continue;
            }
            for name in ours {
                operations.remove(&[&path[..], &[name.as_str()]].concat());
            }
        }
        let requests = self.claim.and_then(|(_, requests)| requests.of_container.get(&index));
        if let (Some(claim), Some(requests)) = (claim, requests) {
            let entry = |request: &String| json!({"name": claim, "request": request});
            let entries: Vec<_> = requests.iter().map(entry).collect();
            add_claims(container, &root, entries, operations);
        }
        let variables = self.environment.iter().filter(|(owner, ..)| *owner == index);
        let variables = variables.map(|(_, name, value)| json!({"name": name, "value": value}));
        add_to_list(&[&root[..], &["env"]].concat(), container.has_env(), variables, operations);
    }
}

fn add_claims(
    container: &Container<'_>,
    root: &[&str],
    entries: Vec<Value>,
    operations: &mut Operations,
) {
    if !container.has_resources() {
        operations.add(&[root, &["resources"]].concat(), json!({"claims": entries}));
        return;
    }
    let path = [root, &["resources", "claims"]].concat();
    add_to_list(&path, container.has_claims(), entries.into_iter(), operations);
}

/// Appends entries to a list, which is made if it does not exist.
fn add_to_list(
    path: &[&str],
    exists: bool,
    entries: impl Iterator<Item = Value>,
    operations: &mut Operations,
) {
    if exists {
        let end = [path, &["-"]].concat();
        entries.for_each(|entry| operations.add(&end, entry));
        return;
    }
    let entries: Vec<_> = entries.collect();
    if !entries.is_empty() {
        operations.add(path, entries.into());
    }
}

fn free_claim_name(taken: &[&str]) -> String {
    let numbered = (1..=taken.len() + 1).map(|number| format!("{CLAIM_NAME}-{number}"));
    let mut names = std::iter::once(CLAIM_NAME.to_owned()).chain(numbered);
    names.find(|name| !taken.contains(&name.as_str())).unwrap_or_default()
}

impl Operations {
    fn add(&mut self, path: &[&str], value: Value) {
        self.0.push(PatchOperation::Add(AddOperation { path: pointer(path), value }));
    }

    fn remove(&mut self, path: &[&str]) {
        self.0.push(PatchOperation::Remove(RemoveOperation { path: pointer(path) }));
    }

    fn replace(&mut self, path: &[&str], value: Value) {
        self.0.push(PatchOperation::Replace(ReplaceOperation { path: pointer(path), value }));
    }
}

fn pointer(path: &[&str]) -> PointerBuf {
    PointerBuf::from_tokens(path.iter().map(|token| Token::new(*token)))
}
