//! Applies the examples of the documentation (`examples/`) to a cluster: each pod runs, and its
//! claim has the devices that it requests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::Trial;
use crate::runner::Runner;
use crate::scenario::ScenarioFile;

/// Seconds until an event is there.
const READY_SECONDS: u64 = 300;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

/// Returns a trial for each directory of `examples/`.
///
/// # Errors
/// A file cannot be read, or is no example.
pub fn trials() -> anyhow::Result<Vec<Trial>> {
    let scenarios = TempDir::new()?;
    for (name, files) in examples()? {
        let scenario = scenario(&files).with_context(|| format!("examples/{name}"))?;
        let file = scenarios.path().join(format!("example-{name}.yaml"));
        std::fs::write(file, scenario.to_string())?;
    }
    let trial = |file: ScenarioFile| {
        let name = file.name.replacen('-', "/", 1);
        Trial::new(name, move |cluster| async move {
            let runner = Runner::new(cluster.client().clone(), cluster.gpu_nodes().clone());
            runner.run(&file).await
        })
    };
    let files = ScenarioFile::read_all(scenarios.path())?;
    anyhow::ensure!(!files.is_empty(), "no examples in {}", directory().display());
    Ok(files.into_iter().map(trial).collect())
}

/// The objects of each file, by directory.
fn examples() -> anyhow::Result<BTreeMap<String, Vec<Vec<Value>>>> {
    let mut examples: BTreeMap<String, Vec<Vec<Value>>> = BTreeMap::new();
    for entry in std::fs::read_dir(directory()).context("read examples")? {
        let path = entry?.path();
        if !path.is_dir() {
            continue;
        }
        let mut files: Vec<PathBuf> = std::fs::read_dir(&path)?
            .map(|file| Ok(file?.path()))
            .collect::<anyhow::Result<_>>()?;
        files.sort();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for file in files {
            let text = std::fs::read_to_string(&file)?;
            let objects = serde_saphyr::from_multiple(&text)
                .with_context(|| format!("parse {}", file.display()))?;
            examples.entry(name.clone()).or_default().push(objects);
        }
    }
    Ok(examples)
}

/// A scenario that applies one file after the other.
fn scenario(files: &[Vec<Value>]) -> anyhow::Result<Value> {
    let mut steps = Vec::new();
    for objects in files {
        steps.extend(file_steps(objects)?);
    }
    Ok(json!({
        "about": "Each pod of the example runs, and its claim has the devices that it requests.",
        "needs": {"h100": 8},
        "steps": steps,
    }))
}

/// Applies the objects, waits for the pod and its devices, and deletes the pod.
fn file_steps(objects: &[Value]) -> anyhow::Result<Vec<Value>> {
    let find = |kind: &str| objects.iter().find(|object| object["kind"] == kind);
    let pod = find("Pod").context("an example has a pod")?;
    let template = find("ResourceClaimTemplate").context("an example has a claim template")?;
    let (Some(name), Some(claim)) =
        (pod["metadata"]["name"].as_str(), pod["spec"]["resourceClaims"][0]["name"].as_str())
    else {
        anyhow::bail!("a pod of an example has a name and a claim");
    };
    let of = format!("{name}/{claim}");
    let applied: Vec<Value> = objects.iter().cloned().map(runnable).collect();
    let mut steps = vec![json!({"apply": {"objects": applied}})];
    if template.to_string().contains(r#""sharing":"MPS""#) {
        // No GPU of the test clusters is shared by MPS unless `trial/mps` runs: the pod is told so.
        let event = json!({"on": format!("Pod/{name}"), "messageContains": ["MPS"], "within": READY_SECONDS});
        steps.push(json!({ "event": event }));
        steps.push(json!({ "unallocated": [of] }));
    } else {
        steps.push(json!({"pods": {"names": name, "phase": "Running"}}));
        steps.push(json!({"gpus": {"of": [of], "each": devices_of(template)}}));
    }
    steps.push(json!({"delete": {"objects": [format!("Pod/{name}")]}}));
    Ok(steps)
}

/// The number of devices that a claim of the template requests.
fn devices_of(template: &Value) -> u64 {
    let requests = template["spec"]["spec"]["devices"]["requests"].as_array();
    let counts = requests.into_iter().flatten();
    counts.map(|request| request["exactly"]["count"].as_u64().unwrap_or(1)).sum()
}

/// The object; a pod with the program and the image that the test clusters have.
fn runnable(mut object: Value) -> Value {
    if object["kind"] == "Pod" {
        object["spec"]["terminationGracePeriodSeconds"] = json!(5);
        for container in object["spec"]["containers"].as_array_mut().into_iter().flatten() {
            container["image"] = json!("tessera/probe:e2e");
            container["imagePullPolicy"] = json!("Never");
            container["command"] = json!(["tessera-probe", "hold"]);
        }
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_directory_is_a_trial() {
        let trials = trials().unwrap();
        assert!(trials.len() >= 10);
        assert!(trials.iter().any(|trial| trial.name() == "example/quarter"));
    }

    #[test]
    fn pods_get_the_image_of_the_test_clusters() {
        let pod = runnable(json!({"kind": "Pod", "spec": {"containers": [{"image": "other"}]}}));
        assert_eq!(pod["spec"]["containers"][0]["image"], "tessera/probe:e2e");
        let class = json!({"kind": "DeviceClass"});
        assert_eq!(runnable(class.clone()), class);
    }
}
