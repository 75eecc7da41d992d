//! Scenario files: what is in one. `scenarios/README.md` describes the format for people.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

/// How long a step may take unless it says otherwise. A real cluster pulls nothing and yet needs
/// some seconds per pod.
const PATIENCE: u64 = 300;

/// A scenario file could not be understood.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// The file or directory could not be read.
    #[error("failed to read `{path}`")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not a scenario.
    #[error("`{path}` is not a scenario")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<serde_saphyr::Error>,
    },
}

/// One file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Scenario {
    /// The file's name without its ending.
    #[serde(skip)]
    pub name: String,
    /// What must hold, in a sentence or two.
    pub about: String,
    /// GPUs that must be there on one node, by a word of their product name. Steps call that node
    /// `${node.WORD}`.
    #[serde(default)]
    pub needs: BTreeMap<String, usize>,
    /// In order.
    pub steps: Vec<Step>,
}

/// One step.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// Creates objects.
    Apply(Apply),
    /// Waits for pods to be in a phase, on a node.
    Pods(Pods),
    /// Waits for a line of the probe's output and compares it.
    Probe(Probe),
    /// Compares the devices that claims got.
    Gpus(Gpus),
    /// Says that claims have no allocation, now.
    Unallocated(Vec<ClaimRef>),
    /// Waits for an event.
    Event(Event),
    /// Deletes objects and waits until they are gone.
    Delete(Delete),
    /// Deletes pods and measures how long a waiting claim then waits for its allocation.
    Room(Room),
}

/// Objects to create, in the scenario's namespace.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Apply {
    /// How many of each; `${i}` in them counts from 1.
    #[serde(default = "one")]
    pub times: u32,
    /// Kubernetes objects.
    pub objects: Vec<Value>,
}

/// Expectation about pods.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Pods {
    /// Which.
    pub names: Names,
    /// Their phase.
    pub phase: String,
    /// Their node.
    #[serde(default)]
    pub node: Option<String>,
    /// Seconds.
    #[serde(default = "patience")]
    pub within: u64,
}

/// Expectation about a line that the probe writes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Probe {
    /// Which pods.
    pub pods: Names,
    /// Which container; the only one without.
    #[serde(default)]
    pub container: Option<String>,
    /// Which containers, instead.
    #[serde(default)]
    pub containers: Vec<String>,
    /// The line's `event`.
    pub event: String,
    /// What else is in it, see [`crate::expectation`].
    #[serde(default = "anything")]
    pub has: Value,
    /// What numbers of it come to over all pods and containers of the step.
    #[serde(default)]
    pub sum: BTreeMap<String, Value>,
    /// Seconds.
    #[serde(default = "patience")]
    pub within: u64,
}

/// Expectation about allocated devices.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Gpus {
    /// Whose devices.
    pub of: Vec<ClaimRef>,
    /// How many different ones they are.
    #[serde(default)]
    pub distinct: Option<usize>,
    /// How many results each claim has.
    #[serde(default)]
    pub each: Option<usize>,
    /// On which node.
    #[serde(default)]
    pub node: Option<String>,
    /// An attribute that has one value on all of them.
    #[serde(default)]
    pub alike: Option<String>,
    /// Attributes that each of them has.
    #[serde(default)]
    pub attributes: Value,
}

/// Expectation about an event.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Event {
    /// `Kind/name`.
    pub on: ObjectRef,
    /// Its reason.
    #[serde(default)]
    pub reason: Option<String>,
    /// Texts that its message contains.
    pub says: Vec<String>,
    /// There is exactly one event object with these words.
    #[serde(default)]
    pub once: bool,
    /// Seconds.
    #[serde(default = "patience")]
    pub within: u64,
}

/// Objects to delete.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Delete {
    /// Which.
    pub objects: Vec<ObjectRef>,
    /// Seconds until they are gone.
    #[serde(default = "patience")]
    pub within: u64,
}

/// Room that is made for a waiting claim.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Room {
    /// The pods that go.
    pub delete: Names,
    /// The claim that gets its place.
    pub allocates: ClaimRef,
    /// Seconds.
    #[serde(default = "patience")]
    pub within: u64,
}

fn anything() -> Value {
    Value::Object(serde_json::Map::new())
}

fn one() -> u32 {
    1
}

fn patience() -> u64 {
    PATIENCE
}

impl Probe {
    /// The containers to look at; one without a name is the only one of its pod.
    pub fn wanted_containers(&self) -> Vec<Option<&str>> {
        match (&self.container, &self.containers[..]) {
            (None, []) => vec![None],
            (one, more) => one.iter().chain(more).map(|name| Some(name.as_str())).collect(),
        }
    }
}

/// A time limit from a step.
pub fn seconds(within: u64) -> Duration {
    Duration::from_secs(within)
}

/// Names; `pod-1..4` stands for four of them.
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

/// `pod-1..4` is `pod-1`, `pod-2`, `pod-3`, `pod-4`. No braces: YAML would want them quoted.
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

/// `POD/CLAIM`: the claim that a pod calls so. Pods as in [`Names`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ClaimRef {
    /// Pods.
    pub pods: Vec<String>,
    /// The name in `spec.resourceClaims`.
    pub claim: String,
}

impl TryFrom<String> for ClaimRef {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (pods, claim) =
            text.split_once('/').ok_or_else(|| format!("`{text}`: write POD/CLAIM"))?;
        Ok(Self { pods: expand(pods), claim: claim.to_owned() })
    }
}

/// `KIND/NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ObjectRef {
    /// As in manifests.
    pub kind: String,
    /// As in [`Names`].
    pub names: Vec<String>,
}

impl TryFrom<String> for ObjectRef {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (kind, names) =
            text.split_once('/').ok_or_else(|| format!("`{text}`: write KIND/NAME"))?;
        Ok(Self { kind: kind.to_owned(), names: expand(names) })
    }
}

/// The text of a scenario file, before names of nodes are filled in.
#[derive(Clone, Debug)]
pub struct ScenarioFile {
    path: PathBuf,
    text: String,
    /// The file's name without its ending.
    pub name: String,
    /// See [`Scenario::needs`].
    pub needs: BTreeMap<String, usize>,
}

impl ScenarioFile {
    /// Reads all files of a directory, by name.
    ///
    /// # Errors
    /// The first that cannot be read or is no scenario.
    pub fn read_all(directory: &Path) -> Result<Vec<Self>, ScenarioError> {
        let failed = |source| ScenarioError::Read { path: directory.to_owned(), source };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(directory).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|extension| extension == "yaml") {
                files.push(Self::read(path)?);
            }
        }
        files.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(files)
    }

    fn read(path: PathBuf) -> Result<Self, ScenarioError> {
        let text = std::fs::read_to_string(&path)
            .map_err(|source| ScenarioError::Read { path: path.clone(), source })?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let scenario = parse(&path, &name, &text)?;
        Ok(Self { path, text, name, needs: scenario.needs })
    }

    /// The scenario with every `${KEY}` replaced that `values` has.
    ///
    /// # Errors
    /// It is no scenario after that.
    pub fn fill_in(&self, values: &BTreeMap<String, String>) -> Result<Scenario, ScenarioError> {
        let mut text = self.text.clone();
        for (key, value) in values {
            text = text.replace(&format!("${{{key}}}"), value);
        }
        parse(&self.path, &self.name, &text)
    }
}

fn parse(path: &Path, name: &str, text: &str) -> Result<Scenario, ScenarioError> {
    let mut scenario: Scenario = serde_saphyr::from_str(text).map_err(|source| {
        ScenarioError::Parse { path: path.to_owned(), source: Box::new(source) }
    })?;
    scenario.name = name.to_owned();
    Ok(scenario)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_dots_stand_for_numbers() {
        let names: Names = serde_saphyr::from_str("[pod-1..3, other, p9..10]").unwrap();
        assert_eq!(names.0, ["pod-1", "pod-2", "pod-3", "other", "p9", "p10"]);
        let one: Names = serde_saphyr::from_str("a..b").unwrap();
        assert_eq!(one.0, ["a..b"]);
        let claims: ClaimRef = serde_saphyr::from_str("p-1..2/gpu").unwrap();
        assert_eq!((claims.pods.len(), claims.claim.as_str()), (2, "gpu"));
    }

    #[test]
    fn a_step_with_a_misspelt_field_is_refused() {
        let text = "about: x\nsteps:\n- pods: {names: p, phase: Running, wihtin: 3}\n";
        assert!(parse(Path::new("x.yaml"), "x", text).is_err());
        let text = "about: x\nsteps:\n- pods: {names: p, phase: Running, within: 3}\n";
        assert_eq!(parse(Path::new("x.yaml"), "x", text).unwrap().steps.len(), 1);
    }

    #[test]
    fn references_have_two_parts() {
        let text = "about: x\nsteps:\n- unallocated: [pod]\n";
        assert!(parse(Path::new("x.yaml"), "x", text).is_err());
    }

    #[test]
    fn every_scenario_file_of_this_crate_is_one() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
        let files = ScenarioFile::read_all(&directory).unwrap();
        assert!(!files.is_empty());
        for file in files {
            assert!(file.name.len() <= 50, "{} is too long for the name of a namespace", file.name);
        }
    }
}
