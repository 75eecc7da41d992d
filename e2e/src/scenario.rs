//! Format of scenario files; `scenarios/README.md` documents it for users.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::Value;

/// Default time limit of a step, in seconds. A real cluster needs some seconds per pod, although it
/// pulls no images.
const TIMEOUT: u64 = 300;

/// One scenario file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Scenario {
    /// File name without extension.
    #[serde(skip)]
    pub name: String,
    /// Expected behaviour, in one or two sentences.
    pub about: String,
    /// GPUs required on one node, by a word of their product name. Steps refer to that node as
    /// `${node.WORD}`.
    #[serde(default)]
    pub needs: BTreeMap<String, usize>,
    /// Steps in order of execution.
    pub steps: Vec<Step>,
}

/// One step of a scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// Creates objects.
    Apply(Apply),
    /// Waits for the phase and node of pods.
    Pods(Pods),
    /// Waits for a line of the probe's output and compares it.
    Probe(Probe),
    /// Compares the devices allocated to claims.
    Gpus(Gpus),
    /// Checks that claims are not allocated at this moment.
    Unallocated(Vec<ClaimRef>),
    /// Waits for an event.
    Event(Event),
    /// Deletes objects and waits until they are deleted.
    Delete(Delete),
    /// Deletes pods and measures the latency until a pending claim is allocated.
    Reallocate(Reallocate),
}

/// Objects to create in the scenario's namespace.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Apply {
    /// Number of copies; `${i}` in the objects is replaced by the number of the copy, from 1.
    #[serde(default = "one_copy")]
    pub times: u32,
    /// Kubernetes objects.
    pub objects: Vec<Value>,
}

/// Expected state of pods.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Pods {
    /// Names of the pods.
    pub names: Names,
    /// Expected phase.
    pub phase: String,
    /// Expected node.
    #[serde(default)]
    pub node: Option<String>,
    /// Time limit in seconds.
    #[serde(default = "default_time_limit")]
    pub within: u64,
}

/// Expected line of the probe's output.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Probe {
    /// Names of the pods.
    pub pods: Names,
    /// Name of the container; not needed if the pod has only one.
    #[serde(default)]
    pub container: Option<String>,
    /// Names of several containers, instead of `container`.
    #[serde(default)]
    pub containers: Vec<String>,
    /// `event` field of the line.
    pub event: String,
    /// Other expected fields; see [`crate::expectation`].
    #[serde(default = "no_expectation")]
    pub has: Value,
    /// Expected sums of numeric fields over all pods and containers of the step.
    #[serde(default)]
    pub sum: BTreeMap<String, Value>,
    /// Time limit in seconds.
    #[serde(default = "default_time_limit")]
    pub within: u64,
}

/// Expected devices of claims.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Gpus {
    /// The claims.
    pub of: Vec<ClaimRef>,
    /// Expected number of distinct devices.
    #[serde(default)]
    pub distinct: Option<usize>,
    /// Expected number of results per claim.
    #[serde(default)]
    pub each: Option<usize>,
    /// Expected node.
    #[serde(default)]
    pub node: Option<String>,
    /// Attribute that must be equal on all devices.
    #[serde(default)]
    pub same_attribute: Option<String>,
    /// Attributes that each device must have.
    #[serde(default)]
    pub attributes: Value,
}

/// Expected event.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Event {
    /// The object, as `Kind/name`.
    pub on: ObjectRef,
    /// Expected reason.
    #[serde(default)]
    pub reason: Option<String>,
    /// Texts that the message must contain.
    pub message_contains: Vec<String>,
    /// Requires exactly one matching event object until the scenario ends.
    #[serde(default)]
    pub once: bool,
    /// Time limit in seconds.
    #[serde(default = "default_time_limit")]
    pub within: u64,
}

/// Objects to delete.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Delete {
    /// The objects.
    pub objects: Vec<ObjectRef>,
    /// Time limit for the deletion in seconds.
    #[serde(default = "default_time_limit")]
    pub within: u64,
}

/// Deletion of pods that frees capacity for a pending claim.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Reallocate {
    /// The pods to delete.
    pub delete: Names,
    /// The claim that must be allocated then.
    pub allocates: ClaimRef,
    /// Time limit in seconds.
    #[serde(default = "default_time_limit")]
    pub within: u64,
}

fn no_expectation() -> Value {
    Value::Object(serde_json::Map::new())
}

fn one_copy() -> u32 {
    1
}

fn default_time_limit() -> u64 {
    TIMEOUT
}

impl Probe {
    /// Returns the containers to check; `None` stands for the only container of its pod.
    pub fn selected_containers(&self) -> Vec<Option<&str>> {
        match (&self.container, &self.containers[..]) {
            (None, []) => vec![None],
            (one, more) => one.iter().chain(more).map(|name| Some(name.as_str())).collect(),
        }
    }
}

/// Returns the time limit of a step as a duration.
pub fn seconds(within: u64) -> Duration {
    Duration::from_secs(within)
}

/// Object names; `pod-1..4` stands for four names.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "OneOrMany")]
pub struct Names(pub Vec<String>);

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl From<OneOrMany> for Names {
    fn from(names: OneOrMany) -> Self {
        let patterns = match names {
            OneOrMany::One(pattern) => vec![pattern],
            OneOrMany::Many(patterns) => patterns,
        };
        Self(patterns.iter().flat_map(|pattern| expand(pattern)).collect())
    }
}

/// Expands `pod-1..4` to `pod-1`, `pod-2`, `pod-3`, `pod-4`. The syntax has no braces, which YAML
/// requires to be quoted.
fn expand(pattern: &str) -> Vec<String> {
    let range = || {
        let (left, last) = pattern.split_once("..")?;
        let stem = left.trim_end_matches(|c: char| c.is_ascii_digit());
        Some((stem, left[stem.len()..].parse::<u32>().ok()?..=last.parse::<u32>().ok()?))
    };
    match range() {
        Some((stem, numbers)) => numbers.map(|number| format!("{stem}{number}")).collect(),
        None => vec![pattern.to_owned()],
    }
}

/// A claim by pod and name, as `POD/CLAIM`. Pods are written as in [`Names`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ClaimRef {
    /// Names of the pods.
    pub pods: Vec<String>,
    /// Name in the pods' `spec.resourceClaims`.
    pub claim: String,
}

impl TryFrom<String> for ClaimRef {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (pods, claim) = text
            .split_once('/')
            .ok_or_else(|| format!("invalid claim reference `{text}`: expected POD/CLAIM"))?;
        Ok(Self { pods: expand(pods), claim: claim.to_owned() })
    }
}

/// Objects of one kind, as `KIND/NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ObjectRef {
    /// Kind, as in manifests.
    pub kind: String,
    /// Names, as in [`Names`].
    pub names: Vec<String>,
}

impl TryFrom<String> for ObjectRef {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (kind, names) = text
            .split_once('/')
            .ok_or_else(|| format!("invalid object reference `{text}`: expected KIND/NAME"))?;
        Ok(Self { kind: kind.to_owned(), names: expand(names) })
    }
}

/// Text of a scenario file, before node names are substituted.
#[derive(Clone, Debug)]
pub struct ScenarioFile {
    path: PathBuf,
    text: String,
    /// File name without extension.
    pub name: String,
    /// Required GPUs; see [`Scenario::needs`].
    pub needs: BTreeMap<String, usize>,
}

impl ScenarioFile {
    /// Reads all scenario files of a directory, sorted by name.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or is not a valid scenario.
    pub fn read_all(directory: &Path) -> anyhow::Result<Vec<Self>> {
        let failed = || format!("cannot read `{}`", directory.display());
        let mut files = Vec::new();
        for entry in std::fs::read_dir(directory).with_context(failed)? {
            let path = entry.with_context(failed)?.path();
            if path.extension().is_some_and(|extension| extension == "yaml") {
                files.push(Self::read(path)?);
            }
        }
        files.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(files)
    }

    fn read(path: PathBuf) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read `{}`", path.display()))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let scenario = parse(&path, &name, &text)?;
        Ok(Self { path, text, name, needs: scenario.needs })
    }

    /// Returns the scenario with each `${KEY}` in `values` substituted.
    ///
    /// # Errors
    /// Returns an error if the result is not a valid scenario.
    pub fn fill_in(&self, values: &BTreeMap<String, String>) -> anyhow::Result<Scenario> {
        let mut text = self.text.clone();
        for (key, value) in values {
            text = text.replace(&format!("${{{key}}}"), value);
        }
        parse(&self.path, &self.name, &text)
    }
}

fn parse(path: &Path, name: &str, text: &str) -> anyhow::Result<Scenario> {
    let mut scenario: Scenario = serde_saphyr::from_str(text)
        .with_context(|| format!("invalid scenario `{}`", path.display()))?;
    scenario.name = name.to_owned();
    Ok(scenario)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_dots_expand_to_numbered_names() {
        let names: Names = serde_saphyr::from_str("[pod-1..3, other, p9..10]").unwrap();
        assert_eq!(names.0, ["pod-1", "pod-2", "pod-3", "other", "p9", "p10"]);
        let one: Names = serde_saphyr::from_str("a..b").unwrap();
        assert_eq!(one.0, ["a..b"]);
        let claims: ClaimRef = serde_saphyr::from_str("p-1..2/gpu").unwrap();
        assert_eq!((claims.pods.len(), claims.claim.as_str()), (2, "gpu"));
    }

    #[test]
    fn refuses_step_with_unknown_field() {
        let text = "about: x\nsteps:\n- pods: {names: p, phase: Running, wihtin: 3}\n";
        assert!(parse(Path::new("x.yaml"), "x", text).is_err());
        let text = "about: x\nsteps:\n- pods: {names: p, phase: Running, within: 3}\n";
        assert_eq!(parse(Path::new("x.yaml"), "x", text).unwrap().steps.len(), 1);
    }

    #[test]
    fn refuses_claim_reference_without_claim() {
        let text = "about: x\nsteps:\n- unallocated: [pod]\n";
        assert!(parse(Path::new("x.yaml"), "x", text).is_err());
    }

    #[test]
    fn parses_every_scenario_file_of_this_crate() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
        let files = ScenarioFile::read_all(&directory).unwrap();
        assert!(!files.is_empty());
        for file in files {
            assert!(file.name.len() <= 50, "{} is too long for the name of a namespace", file.name);
        }
    }
}
