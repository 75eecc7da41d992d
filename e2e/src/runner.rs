//! Runs a scenario: a namespace of its own, its steps in order, and nothing left of it.

mod claims;
mod events;
mod pods;
mod room;

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{DeleteParams, DynamicObject, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use crate::inventory::{GpuInventory, GpuNodes};
use crate::leftovers::{self, LeftoverError};
use crate::objects::{self, UnknownKind};
use crate::scenario::{
    Apply, Delete, Event, ObjectRef, Scenario, ScenarioError, ScenarioFile, Step, seconds,
};
use crate::wait::{self, Verdict, WaitError};

/// How long a namespace may take to go, with pods that end in their grace period.
const NAMESPACE_PATIENCE: Duration = Duration::from_secs(300);

/// A step that did not hold.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The API server refused a request.
    #[error("{what}")]
    Api {
        /// What was to be done.
        what: String,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// A wait was in vain.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// Something else was seen than expected.
    #[error("{of}: {difference}")]
    Differs {
        /// Of what.
        of: String,
        /// The difference.
        difference: String,
    },
    /// The file names a kind that it cannot.
    #[error(transparent)]
    Kind(#[from] UnknownKind),
    /// A manifest of the file is no object.
    #[error("`{name}` is not an object of the API")]
    Manifest {
        /// Its name.
        name: String,
        /// Why.
        source: serde_json::Error,
    },
    /// A container's output ended or could not be read.
    #[error("output of {of}")]
    Output {
        /// Of which container.
        of: String,
        /// Why.
        source: std::io::Error,
    },
    /// The namespace's end left something.
    #[error(transparent)]
    Leftover(#[from] LeftoverError),
}

/// A scenario that did not hold, or could not be run.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioFailure {
    /// Its file is not one.
    #[error(transparent)]
    File(#[from] ScenarioError),
    /// A step.
    #[error("step {number}")]
    Step {
        /// Counted from 1.
        number: usize,
        /// What did not hold.
        source: StepError,
    },
    /// Cleaning up.
    #[error("after the last step")]
    CleanUp {
        /// What was left, or went wrong.
        source: StepError,
    },
}

/// What a scenario came to.
#[derive(Debug)]
pub enum Outcome {
    /// It holds; with figures that it measured.
    Held(Vec<Figure>),
    /// The cluster lacks what it needs.
    Skipped(String),
}

/// Something measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Of what.
    pub of: String,
    /// How long it took.
    pub took: Duration,
}

/// Runs scenarios against one cluster.
#[derive(Clone)]
pub struct Runner {
    client: Client,
    gpu_nodes: GpuNodes,
}

/// One scenario under way.
struct Run<'a> {
    client: &'a Client,
    namespace: String,
    inventory: GpuInventory,
    /// Objects that outlive the namespace.
    cluster_scoped: Vec<ObjectRef>,
    /// Events that are to be there once, to the end.
    once: Vec<Event>,
    figures: Vec<Figure>,
}

impl Runner {
    /// A runner against the cluster of this client.
    pub fn new(client: Client, gpu_nodes: GpuNodes) -> Self {
        Self { client, gpu_nodes }
    }

    /// Runs one file. Whatever comes of it, its namespace is deleted.
    ///
    /// # Errors
    /// The first step that does not hold, or what is left afterwards.
    pub async fn run(&self, file: &ScenarioFile) -> Result<Outcome, ScenarioFailure> {
        let clean_up = |source| ScenarioFailure::CleanUp { source };
        let published = self.gpu_nodes.publish(&self.client).await;
        published.map_err(|error| clean_up(error.into()))?;
        let inventory = GpuInventory::read(&self.client)
            .await
            .map_err(|error| clean_up(api("list slices", error)))?;
        let namespace = format!("scn-{}", file.name);
        let mut values = BTreeMap::from([("namespace".to_owned(), namespace.clone())]);
        for (word, count) in &file.needs {
            let Some(node) = inventory.node_with(word, *count) else {
                return Ok(Outcome::Skipped(format!("no node with {count} {word} GPUs")));
            };
            values.insert(format!("node.{word}"), node.to_owned());
        }
        let scenario = file.fill_in(&values)?;
        // What an interrupted run left.
        let gone = leftovers::delete_namespace(&self.client, &namespace, NAMESPACE_PATIENCE).await;
        gone.map_err(|error| clean_up(error.into()))?;
        leftovers::none_allocated(&self.client).await.map_err(|error| clean_up(error.into()))?;
        let mut run = Run {
            client: &self.client,
            namespace,
            inventory,
            cluster_scoped: Vec::new(),
            once: Vec::new(),
            figures: Vec::new(),
        };
        run.create_namespace().await.map_err(clean_up)?;
        let outcome = run.steps(&scenario).await;
        let cleaned = run.clean_up().await.map_err(clean_up);
        outcome.and(cleaned)?;
        Ok(Outcome::Held(run.figures))
    }
}

impl Run<'_> {
    async fn create_namespace(&self) -> Result<(), StepError> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let namespace = serde_json::from_value(json!({"metadata": {"name": self.namespace}}))
            .map_err(|source| StepError::Manifest { name: self.namespace.clone(), source })?;
        namespaces
            .create(&PostParams::default(), &namespace)
            .await
            .map(drop)
            .map_err(|error| api(&format!("create namespace {}", self.namespace), error))
    }

    async fn steps(&mut self, scenario: &Scenario) -> Result<(), ScenarioFailure> {
        for (index, step) in scenario.steps.iter().enumerate() {
            self.step(step)
                .await
                .map_err(|source| ScenarioFailure::Step { number: index + 1, source })?;
        }
        self.still_once().await.map_err(|source| ScenarioFailure::CleanUp { source })
    }

    async fn step(&mut self, step: &Step) -> Result<(), StepError> {
        match step {
            Step::Apply(apply) => self.apply(apply).await,
            Step::Pods(pods) => self.pods(pods).await,
            Step::Probe(probe) => self.probe(probe).await,
            Step::Gpus(gpus) => self.gpus(gpus).await,
            Step::Unallocated(claims) => self.unallocated(claims).await,
            Step::Event(event) => self.event(event).await,
            Step::Delete(delete) => self.delete(delete).await,
            Step::Room(room) => self.room(room).await,
        }
    }

    async fn apply(&mut self, apply: &Apply) -> Result<(), StepError> {
        for number in 1..=apply.times {
            for object in &apply.objects {
                self.create(&objects::complete(object, number)?).await?;
            }
        }
        Ok(())
    }

    async fn create(&mut self, object: &Value) -> Result<(), StepError> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
        let dynamic: DynamicObject = serde_json::from_value(object.clone())
            .map_err(|source| StepError::Manifest { name: name.clone(), source })?;
        objects::api(self.client, &kind, &self.namespace)?
            .create(&PostParams::default(), &dynamic)
            .await
            .map_err(|error| api(&format!("create {kind} {name}"), error))?;
        if objects::is_cluster_scoped(&kind) {
            self.cluster_scoped.push(ObjectRef { kind, names: vec![name] });
        }
        Ok(())
    }

    async fn delete(&self, delete: &Delete) -> Result<(), StepError> {
        for object in &delete.objects {
            for name in &object.names {
                self.delete_one(&object.kind, name).await?;
            }
        }
        for object in &delete.objects {
            for name in &object.names {
                self.gone(&object.kind, name, seconds(delete.within)).await?;
            }
        }
        Ok(())
    }

    async fn delete_one(&self, kind: &str, name: &str) -> Result<(), StepError> {
        match objects::api(self.client, kind, &self.namespace)?
            .delete(name, &DeleteParams::default())
            .await
        {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(api(&format!("delete {kind} {name}"), error)),
        }
    }

    async fn gone(&self, kind: &str, name: &str, within: Duration) -> Result<(), StepError> {
        let what = format!("{kind} {name} to be gone");
        let objects = objects::api(self.client, kind, &self.namespace)?;
        let judge = |object: Option<&DynamicObject>| match object {
            None => Verdict::Done(()),
            Some(object) => Verdict::NotYet(format!("there, finalizers {:?}", object.finalizers())),
        };
        Ok(wait::until_one(objects, name, &what, within, judge).await?)
    }

    /// Deletes the namespace, waits until it is gone, and looks for what it left.
    async fn clean_up(&self) -> Result<(), StepError> {
        for object in &self.cluster_scoped {
            for name in &object.names {
                self.delete_one(&object.kind, name).await?;
            }
        }
        leftovers::delete_namespace(self.client, &self.namespace, NAMESPACE_PATIENCE).await?;
        Ok(leftovers::none_of_namespace(self.client, &self.namespace).await?)
    }
}

fn api(what: &str, error: kube::Error) -> StepError {
    StepError::Api { what: what.to_owned(), source: Box::new(error) }
}
