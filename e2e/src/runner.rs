//! Runs a scenario: creates its namespace, executes its steps in order, and deletes the namespace.

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
use crate::wait::{self, CheckResult, WaitError};

/// Time limit for the deletion of a namespace, including the grace periods of its pods.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(300);

/// Error of a failed step.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// A request to the API server failed.
    #[error("cannot {action}")]
    Api {
        /// The request.
        action: String,
        /// The cause.
        source: Box<kube::Error>,
    },
    /// A wait failed.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// An observed value differs from the expected one.
    #[error("{object}: {difference}")]
    Differs {
        /// The object.
        object: String,
        /// The difference.
        difference: String,
    },
    /// The file uses an unsupported kind.
    #[error(transparent)]
    Kind(#[from] UnknownKind),
    /// A manifest in the file is not a valid object.
    #[error("`{name}` is not an object of the API")]
    Manifest {
        /// Name of the object.
        name: String,
        /// The cause.
        source: serde_json::Error,
    },
    /// The output of a container cannot be read.
    #[error("cannot read the output of {object}")]
    Output {
        /// The container.
        object: String,
        /// The cause.
        source: std::io::Error,
    },
    /// Objects were left after the cleanup.
    #[error(transparent)]
    Leftover(#[from] LeftoverError),
}

/// Error of a failed scenario.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioFailure {
    /// The file is invalid.
    #[error(transparent)]
    File(#[from] ScenarioError),
    /// A step failed.
    #[error("step {number} failed")]
    Step {
        /// Number of the step, from 1.
        number: usize,
        /// The cause.
        source: StepError,
    },
    /// The cleanup failed.
    #[error("cannot clean up")]
    CleanUp {
        /// The cause.
        source: StepError,
    },
}

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

    /// Runs one file. The namespace is deleted in every case.
    ///
    /// # Errors
    /// Returns the error of the first failed step, or of the cleanup.
    pub async fn run(&self, file: &ScenarioFile) -> Result<Outcome, ScenarioFailure> {
        let clean_up = |source| ScenarioFailure::CleanUp { source };
        let published = self.gpu_nodes.publish(&self.client).await;
        published.map_err(|error| clean_up(error.into()))?;
        let inventory = GpuInventory::read(&self.client)
            .await
            .map_err(|error| clean_up(api_error("list slices", error)))?;
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
        let deleted =
            leftovers::delete_namespace(&self.client, &namespace, NAMESPACE_TIMEOUT).await;
        deleted.map_err(|error| clean_up(error.into()))?;
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
        Ok(Outcome::Passed(run.figures))
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
            .map_err(|error| api_error(&format!("create namespace {}", self.namespace), error))
    }

    async fn steps(&mut self, scenario: &Scenario) -> Result<(), ScenarioFailure> {
        for (index, step) in scenario.steps.iter().enumerate() {
            self.step(step)
                .await
                .map_err(|source| ScenarioFailure::Step { number: index + 1, source })?;
        }
        self.check_events_are_unique().await.map_err(|source| ScenarioFailure::CleanUp { source })
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
            .map_err(|error| api_error(&format!("create {kind} {name}"), error))?;
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
                self.wait_deleted(&object.kind, name, seconds(delete.within)).await?;
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
            Err(error) => Err(api_error(&format!("delete {kind} {name}"), error)),
        }
    }

    async fn wait_deleted(
        &self,
        kind: &str,
        name: &str,
        within: Duration,
    ) -> Result<(), StepError> {
        let what = format!("{kind} {name} to be deleted");
        let objects = objects::api(self.client, kind, &self.namespace)?;
        let check = |object: Option<&DynamicObject>| match object {
            None => CheckResult::Done(()),
            Some(object) => {
                CheckResult::Pending(format!("exists, finalizers {:?}", object.finalizers()))
            }
        };
        Ok(wait::until_one(objects, name, &what, within, check).await?)
    }

    /// Deletes the namespace, waits until it is deleted, and checks for remaining objects.
    async fn clean_up(&self) -> Result<(), StepError> {
        for object in &self.cluster_scoped {
            for name in &object.names {
                self.delete_one(&object.kind, name).await?;
            }
        }
        leftovers::delete_namespace(self.client, &self.namespace, NAMESPACE_TIMEOUT).await?;
        Ok(leftovers::none_of_namespace(self.client, &self.namespace).await?)
    }
}

fn api_error(action: &str, error: kube::Error) -> StepError {
    StepError::Api { action: action.to_owned(), source: Box::new(error) }
}
