//! `kubectl tessera simulate`: what would be placed where, if these objects were there too.
//!
//! The objects of the files are put beside those of the snapshot as Kubernetes would: claims are
//! made from templates, workloads become pods. Then the controller's planner plans all pods that
//! wait, theirs last among equals. Nothing is written anywhere.

mod expand;
mod manifest;
mod render;

pub use manifest::ManifestError;
pub use render::text;

use serde::Serialize;
use tessera_allocator::Settings;
use tessera_api::names::{Namespace, PodName};

use crate::explain::{self, ClaimReport, ExplainError, PodReport, PodState, View};
use crate::snapshot::Snapshot;

/// What would happen.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Simulation {
    /// The pods of the files, in their order.
    pub pods: Vec<SimulatedPod>,
    /// Pods that wait in the cluster already: those of the same or higher priority are planned
    /// before.
    pub waiting_before: usize,
    /// What the result should be read with.
    pub notes: Vec<String>,
}

/// What would happen to one pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SimulatedPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name; pods of a Deployment or Job get another one in the cluster.
    pub pod: String,
    /// In one word.
    pub result: Outcome,
    /// In one sentence.
    pub message: String,
    /// The node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Its claims.
    pub claims: Vec<ClaimReport>,
}

/// What would happen to one pod, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Outcome {
    /// Its claims would be allocated, or are.
    Fits,
    /// It would have to wait.
    DoesNotFit,
    /// It asks nothing of Tessera.
    NotConcerned,
    /// A pod of that name is there already.
    Exists,
}

impl Simulation {
    /// Whether a pod of the files would have to wait.
    pub fn lacks_room(&self) -> bool {
        self.pods.iter().any(|pod| pod.result == Outcome::DoesNotFit)
    }
}

/// Plans the objects of `manifests` (YAML or JSON documents) on top of `snapshot`. Those without a
/// namespace get `namespace`.
///
/// # Errors
/// A document is not an object that the API server would take.
pub fn simulate(
    snapshot: &Snapshot,
    manifests: &str,
    namespace: &Namespace,
    settings: Settings,
) -> Result<Simulation, ManifestError> {
    let added = manifest::read(manifests, namespace)?;
    let before = snapshot.picture();
    let waiting_before = before.index.work().pending.len();
    let mut snapshot = snapshot.clone();
    let expanded = expand::into_snapshot(&mut snapshot, added);
    let picture = snapshot.picture();
    let mut notes = expanded.notes;
    notes.extend(picture.unusable.iter().cloned());
    let view = View::new(&snapshot, &picture, settings, snapshot.taken_at);
    notes.extend(explain::supply(&view).into_iter().map(|finding| finding.message));
    let pods = expanded
        .pods
        .iter()
        .map(|(namespace, name, exists)| one(&view, namespace, name, *exists))
        .collect();
    Ok(Simulation { pods, waiting_before, notes })
}

fn one(view: &View<'_>, namespace: &Namespace, name: &PodName, exists: bool) -> SimulatedPod {
    let simulated = |result, message, node, claims| SimulatedPod {
        namespace: namespace.to_string(),
        pod: name.to_string(),
        result,
        message,
        node,
        claims,
    };
    if exists {
        let message = format!(
            "it is in the cluster already; see `kubectl tessera explain pod {name} -n {namespace}`"
        );
        return simulated(Outcome::Exists, message, None, Vec::new());
    }
    match explain::pod(view, namespace, name, &[]) {
        Ok(PodReport { state, message, node, claims, .. }) => {
            let (result, message) = match state {
                PodState::NoClaims | PodState::Foreign => (Outcome::NotConcerned, message),
                PodState::Placeable => (Outcome::Fits, "it fits".to_owned()),
                PodState::ForScheduler => {
                    (Outcome::Fits, "its claims are allocated already".to_owned())
                }
                PodState::Bound | PodState::Ended | PodState::Deleting => {
                    (Outcome::NotConcerned, message)
                }
                _ => (Outcome::DoesNotFit, message),
            };
            simulated(result, message, node, claims)
        }
        Err(error @ (ExplainError::NoPod { .. } | ExplainError::NoClaim { .. })) => {
            simulated(Outcome::DoesNotFit, error.to_string(), None, Vec::new())
        }
    }
}
