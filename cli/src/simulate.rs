//! `kubectl tessera simulate`: the placement of pods from manifests, as a dry run.
//!
//! The objects of the files are added to those of the snapshot as Kubernetes would: claims are
//! generated from templates, and workloads become pods. Then the controller's planner plans all
//! pending pods; those of the files come last among equals. Nothing is written.

mod expand;
mod manifest;
mod priority;
mod render;

pub use manifest::ManifestError;
pub use render::text;

use serde::Serialize;
use tessera_allocator::model::PendingPod;
use tessera_allocator::{AllocationPlan, PlanSettings};
use tessera_api::names::{Namespace, PodName};
use tessera_index::Index;

use crate::explain::{self, ExplainError, PlanView, PodClaimReport, PodReport, PodState};
use crate::preemption::{PossiblePreemption, Preemptions};
use crate::snapshot::Snapshot;
use crate::tree::{CapacityUsage, GpuTree, TreeFilter};

/// The result of a simulation.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Simulation {
    /// The pods of the files, in their order.
    pub pods: Vec<SimulatedPod>,
    /// Number of pods that are pending in the cluster. Those of the same or higher priority are
    /// planned first.
    #[serde(rename = "waitingBefore")]
    pub pending_before: usize,
    /// Usage of all GPUs after the planned allocations.
    pub totals: SimulatedTotals,
    /// Remarks about the files and the cluster.
    pub notes: Vec<String>,
}

/// Usage of all GPUs after the planned allocations, those of pending pods of the cluster included.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SimulatedTotals {
    /// Number of GPUs.
    pub gpus: usize,
    /// Number of GPUs without allocations.
    pub free_gpus: usize,
    /// Device memory.
    pub memory: CapacityUsage,
    /// Compute, in percent of one GPU.
    pub cores: CapacityUsage,
}

/// The simulated result of one pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SimulatedPod {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name. Pods of a Deployment or Job get another name in the cluster.
    pub pod: String,
    /// The result, in one word.
    pub result: SimulatedOutcome,
    /// The result, in one sentence.
    pub message: String,
    /// The node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The pod's claims.
    pub claims: Vec<PodClaimReport>,
    /// Evictions after which the pod would fit, if they were asked for and it does not fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preemption: Option<PossiblePreemption>,
}

/// The simulated result of one pod, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum SimulatedOutcome {
    /// The pod's claims would be allocated, or are already.
    Fits,
    /// The pod would be pending.
    DoesNotFit,
    /// The pod uses no claims of Tessera.
    NotApplicable,
    /// The cluster has a pod of that name.
    Exists,
}

impl Simulation {
    /// Returns true if no pod of the files would be pending.
    pub fn fits(&self) -> bool {
        self.pods.iter().all(|pod| pod.result != SimulatedOutcome::DoesNotFit)
    }
}

/// Plans the objects of `manifests` (YAML or JSON documents) on top of `snapshot`. Objects without
/// a namespace get `namespace`. With `preempt`, pods that do not fit get the evictions after which
/// they would, each as if it were the only one.
///
/// # Errors
/// A document is not an object that the API server would accept.
pub fn simulate(
    snapshot: &Snapshot,
    manifests: &str,
    namespace: &Namespace,
    settings: PlanSettings,
    preempt: bool,
) -> Result<Simulation, ManifestError> {
    let added = manifest::read(manifests, namespace)?;
    let before = snapshot.indexed();
    let pending_before = before.index.work().pending.len();
    let mut snapshot = snapshot.clone();
    let expanded = expand::into_snapshot(&mut snapshot, added)?;
    let indexed = snapshot.indexed();
    let mut notes = expanded.notes;
    notes.extend(indexed.refused.iter().cloned());
    let view = PlanView::new(&snapshot, &indexed, settings, snapshot.taken_at);
    notes.extend(explain::supply(&view).into_iter().map(|finding| finding.message));
    let mut pods: Vec<SimulatedPod> = expanded
        .pods
        .iter()
        .map(|(namespace, name, exists)| simulated_pod(&view, namespace, name, *exists))
        .collect();
    let after = index_after(&snapshot, &view.plan);
    if preempt {
        let preemptions = Preemptions::new(&after, view.settings);
        pods.iter_mut().for_each(|pod| pod.preemption = preemption(&view, &preemptions, pod));
    }
    let totals = totals(&after);
    Ok(Simulation { pods, pending_before, totals, notes })
}

/// Returns the index after the allocations of a plan.
fn index_after(snapshot: &Snapshot, plan: &AllocationPlan) -> Index {
    let mut index = snapshot.indexed().index;
    let claim_allocations = plan.decisions.iter().flat_map(|decision| &decision.claims);
    claim_allocations.for_each(|claim_allocation| index.assume(claim_allocation));
    index
}

/// Returns the usage of all GPUs.
fn totals(index: &Index) -> SimulatedTotals {
    let tree = GpuTree::read(index, &TreeFilter::default());
    let (memory, cores) = tree.usage();
    let free_gpus = tree.gpus().filter(|gpu| gpu.is_free()).count();
    SimulatedTotals { gpus: tree.gpus().count(), free_gpus, memory, cores }
}

/// Returns the evictions for a simulated pod that does not fit.
fn preemption(
    view: &PlanView<'_>,
    preemptions: &Preemptions<'_>,
    pod: &SimulatedPod,
) -> Option<PossiblePreemption> {
    let is_it = |pending: &&PendingPod| {
        pending.namespace.as_str() == pod.namespace && pending.name.as_str() == pod.pod
    };
    let pending = view.work.pending.iter().find(is_it);
    let refused = pending.filter(|_| pod.result == SimulatedOutcome::DoesNotFit);
    preemptions.of(refused?)
}

fn simulated_pod(
    view: &PlanView<'_>,
    namespace: &Namespace,
    name: &PodName,
    exists: bool,
) -> SimulatedPod {
    let simulated = |result, message, node, claims| SimulatedPod {
        namespace: namespace.to_string(),
        pod: name.to_string(),
        result,
        message,
        node,
        claims,
        preemption: None,
    };
    if exists {
        let message = format!(
            "the cluster has a pod of that name; see `kubectl tessera explain pod {name} -n \
             {namespace}`"
        );
        return simulated(SimulatedOutcome::Exists, message, None, Vec::new());
    }
    match explain::pod(view, namespace, name, &[]) {
        Ok(PodReport { state, message, node, claims, .. }) => {
            let (result, message) = match state {
                PodState::Schedulable => (SimulatedOutcome::Fits, "it fits".to_owned()),
                PodState::PendingScheduling => {
                    (SimulatedOutcome::Fits, "its claims are already allocated".to_owned())
                }
                PodState::NoClaims
                | PodState::NotManaged
                | PodState::Bound
                | PodState::Completed
                | PodState::Terminating => (SimulatedOutcome::NotApplicable, message),
                _ => (SimulatedOutcome::DoesNotFit, message),
            };
            simulated(result, message, node, claims)
        }
        Err(
            error @ (ExplainError::NoPod { .. }
            | ExplainError::NoClaim { .. }
            | ExplainError::NoEntry { .. }
            | ExplainError::NotGenerated { .. }),
        ) => simulated(SimulatedOutcome::DoesNotFit, error.to_string(), None, Vec::new()),
    }
}
