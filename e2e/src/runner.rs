//! Runs a scenario: creates its namespace, executes its steps in order, and deletes the namespace.

mod claims;
mod events;
mod pods;
mod reallocate;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use kube::Client;
use kube::api::{DeleteParams, DynamicObject, PostParams};
use serde_json::Value;

use crate::inventory::{GpuInventory, GpuNodes};
use crate::leftovers;
use crate::objects;
use crate::scenario::{Apply, Delete, Event, ObjectRef, Scenario, ScenarioFile, Step, seconds};
use crate::wait::{self, CheckResult};

/// Time limit for the deletion of a namespace, including the grace periods of its pods.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(300);

/// Outcome of a scenario or trial.
#[derive(Debug)]
pub enum Outcome {
    /// It passed, with the figures that it measured.
    Passed(Vec<Figure>),
    /// It was skipped; the cluster lacks what it needs.
    Skipped(String),
}

/// One measured duration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Name of the measurement.
    pub name: String,
    /// The duration.
    pub duration: Duration,
}

/// Runs scenarios on one cluster.
#[derive(Clone)]
pub struct Runner {
    client: Client,
    gpu_nodes: GpuNodes,
}

/// A scenario in progress.
struct Run<'a> {
    client: &'a Client,
    namespace: String,
    inventory: GpuInventory,
    /// Cluster-scoped objects, which outlive the namespace.
    cluster_scoped: Vec<ObjectRef>,
    /// Events that must exist exactly once when the scenario ends.
    once: Vec<Event>,
    figures: Vec<Figure>,
}

impl Runner {
    /// Creates a runner for the client's cluster.
    pub fn new(client: Client, gpu_nodes: GpuNodes) -> Self {
        Self { client, gpu_nodes }
    }

    /// Runs one file. The namespace is cleared in every case.
    ///
    /// # Errors
    /// Returns the error of the first failed step, or of the cleanup.
    pub async fn run(&self, file: &ScenarioFile) -> anyhow::Result<Outcome> {
        let inventory = self.gpu_nodes.inventory(&self.client).await?;
        let namespace = format!("scn-{}", file.name);
        let mut values = BTreeMap::from([("namespace".to_owned(), namespace.clone())]);
        for (word, count) in &file.needs {
            let Some(node) = inventory.node_with(word, *count) else {
                return Ok(Outcome::Skipped(format!("no node with {count} {word} GPUs")));
            };
            values.insert(format!("node.{word}"), node.to_owned());
        }
        let scenario = file.fill_in(&values)?;
        // Left by an interrupted run.
        leftovers::delete_namespace(&self.client, &namespace, NAMESPACE_TIMEOUT).await?;
        leftovers::none_allocated(&self.client).await?;
        let mut run = Run {
            client: &self.client,
            namespace,
            inventory,
            cluster_scoped: Vec::new(),
            once: Vec::new(),
            figures: Vec::new(),
        };
        leftovers::create_namespace(&self.client, &run.namespace).await?;
        let outcome = run.steps(&scenario).await;
        let cleaned = run.clean_up().await.context("cannot clean up");
        outcome.and(cleaned)?;
        Ok(Outcome::Passed(run.figures))
    }
}

impl Run<'_> {
    async fn steps(&mut self, scenario: &Scenario) -> anyhow::Result<()> {
        for (index, step) in scenario.steps.iter().enumerate() {
            self.step(step).await.with_context(|| format!("step {} failed", index + 1))?;
        }
        self.check_events_are_unique().await
    }

    async fn step(&mut self, step: &Step) -> anyhow::Result<()> {
        match step {
            Step::Apply(apply) => self.apply(apply).await,
            Step::Pods(pods) => self.pods(pods).await,
            Step::Probe(probe) => self.probe(probe).await,
            Step::Gpus(gpus) => self.gpus(gpus).await,
            Step::Unallocated(claims) => self.unallocated(claims).await,
            Step::Event(event) => self.event(event).await,
            Step::Delete(delete) => self.delete(delete).await,
            Step::Reallocate(reallocate) => self.reallocate(reallocate).await,
        }
    }

    async fn apply(&mut self, apply: &Apply) -> anyhow::Result<()> {
        for number in 1..=apply.times {
            for object in &apply.objects {
                self.create(&objects::complete(object, number)?).await?;
            }
        }
        Ok(())
    }

    async fn create(&mut self, object: &Value) -> anyhow::Result<()> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
        let dynamic: DynamicObject = serde_json::from_value(object.clone())
            .with_context(|| format!("`{name}` is not an object of the API"))?;
        objects::api(self.client, &kind, &self.namespace)?
            .create(&PostParams::default(), &dynamic)
            .await
            .with_context(|| format!("cannot create {kind} {name}"))?;
        if objects::is_cluster_scoped(&kind) {
            self.cluster_scoped.push(ObjectRef { kind, names: vec![name] });
        }
        Ok(())
    }

    async fn delete(&self, delete: &Delete) -> anyhow::Result<()> {
        for object in &delete.objects {
            for name in &object.names {
                self.delete_one(&object.kind, name).await?;
            }
        }
        for object in &delete.objects {
            for name in &object.names {
                self.wait_deleted(&object.kind, name, seconds(delete.within)).await?;
            }
        }
        Ok(())
    }

    async fn delete_one(&self, kind: &str, name: &str) -> anyhow::Result<()> {
        match objects::api(self.client, kind, &self.namespace)?
            .delete(name, &DeleteParams::default())
            .await
        {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(error).with_context(|| format!("cannot delete {kind} {name}")),
        }
    }

    async fn wait_deleted(&self, kind: &str, name: &str, within: Duration) -> anyhow::Result<()> {
        let what = format!("{kind} {name} to be deleted");
        let objects = objects::api(self.client, kind, &self.namespace)?;
        Ok(wait::until_one(objects, name, &what, within, CheckResult::deleted).await?)
    }

    /// Deletes the namespace, and waits until its pods and claims are deleted.
    async fn clean_up(&self) -> anyhow::Result<()> {
        for object in &self.cluster_scoped {
            for name in &object.names {
                self.delete_one(&object.kind, name).await?;
            }
        }
        leftovers::clear_namespace(self.client, &self.namespace, NAMESPACE_TIMEOUT).await
    }
}
