//! Conversion of a pod's claims to requests of the [`fragmentation`](crate::fragmentation) model.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::Planner;
use super::budget::Budget;
use super::samples::{DeviceSamples, Sample};
use super::turns::Turns;
use crate::cluster::{Cluster, ProfileId};
use crate::fragmentation::{GpuFraction, GpuRequest, GpuType, GpuTypes};
use crate::model::{Claim, Device, PendingPod, PodUid, SchedulingConstraints, cpu_milli_of};
use crate::policy::{Policy, share};
use crate::predicate;
use crate::search::MAX_RESULTS;
use crate::shape::{AlternativeShape, ProfileDemand, Selections, Selects, Shape};

/// Maximum number of cached sets of GPU types per node selection.
const MAX_CACHED: usize = 64;

/// GPU types in the cluster, and the types that pods accept. Valid until a node reaches other
/// devices.
#[derive(Debug, Default)]
pub(super) struct AcceptedTypes {
    layout: Option<u64>,
    samples: DeviceSamples,
    /// Types on the nodes that match scheduling constraints.
    of_nodes: Vec<(Arc<SchedulingConstraints>, BTreeSet<GpuType>)>,
    /// Pods whose requests can never be met.
    impossible: BTreeSet<PodUid>,
}

/// Steps charged for the conversion of one pod, in addition to selector evaluation.
///
/// The conversion costs about as much as testing this number of devices.
const STEPS_PER_REQUEST: u64 = 10;

/// Maximum number of pods cached as impossible. Beyond it all are examined again.
const MAX_IMPOSSIBLE: usize = 100_000;

/// Error: the steps of a plan do not suffice.
struct OutOfSteps;

impl Planner {
    /// Adds the requests of new pods to the forecast if a policy uses it. It takes half of the
    /// steps of a plan at most, in addition to them. A later plan adds the other pods, and those
    /// of namespaces that exceed their share.
    pub(super) fn observe(&mut self, turns: &Turns<'_>, policy: Policy, budget: &mut Budget) {
        if !policy.uses_forecast() && !self.cluster.is_cpu_ranked() {
            return;
        }
        self.accepted.refresh(&mut self.cluster);
        let is_new = |pod: &&PendingPod| {
            self.forecast.is_new(&pod.uid)
                && !self.accepted.impossible.contains(&pod.uid)
                && !self.withheld.contains(&pod.namespace)
                && !self.fair_share.exceeds_share(&pod.namespace, 0, budget.of_plan)
        };
        let new = turns.pods().into_iter().filter(is_new).collect::<Vec<_>>();
        let mut requests = BTreeMap::new();
        let mut steps = budget.of_plan / 2;
        for pod in new {
            if steps == 0 {
                break;
            }
            let given = steps;
            self.selections.begin_pod(false);
            let request = self.request(pod, policy, &mut steps);
            // Those of a selector that is not compiled are left for other pods.
            steps += self.selections.withheld_steps();
            let selectors = self.selections.charged();
            budget.charge(&pod.namespace, selectors.max(given - steps));
            budget.charge_selectors(&pod.namespace, &self.selections);
            match request {
                Ok(Some(request)) => drop(requests.insert(pod.uid.clone(), request)),
                Ok(None) => self.accepted.set_impossible(&pod.uid),
                Err(OutOfSteps) if self.selections.was_withheld() => {}
                Err(OutOfSteps) => break,
            }
            steps = steps.saturating_sub(STEPS_PER_REQUEST);
        }
        self.forecast.observe(requests, || turns.pending());
    }

    /// Returns the request of the pod; `None` if it can never be met. Where the steps end before,
    /// the results of selectors are kept.
    fn request(
        &mut self,
        pod: &PendingPod,
        policy: Policy,
        steps: &mut u64,
    ) -> Result<Option<GpuRequest>, OutOfSteps> {
        let mut pending: Vec<Arc<Claim>> = pod.pending_claims().cloned().collect();
        let mut known = BTreeSet::new();
        pending.retain(|claim| known.insert(claim.uid.clone()));
        let cpu_milli = cpu_milli_of(&pod.scheduling.requests);
        let class = self.class_of(pod, &pending, policy);
        let shape = self.shape_of_class(class, &pending, cpu_milli, policy);
        let Self { cluster, selections, shapes, accepted, .. } = self;
        let shape = &mut shapes.get_mut(shape).shape;
        let Some((gpus, share, mut types)) =
            accepted.of_shape(shape, cluster, selections, steps)?
        else {
            return Ok(None);
        };
        if let Some(of_nodes) = accepted.of_nodes(&pod.scheduling, cluster) {
            types.retain(|kind| of_nodes.contains(kind));
        }
        // A request for more devices than the claims can hold is never met.
        if types.is_empty() || gpus as usize > MAX_RESULTS * pending.len() {
            return Ok(None);
        }
        let is_any = types.len() == accepted.types().len();
        let types = if is_any { GpuTypes::ANY } else { GpuTypes::of(types) };
        Ok(Some(GpuRequest { cpu_milli, gpus, share, types }))
    }
}

impl AcceptedTypes {
    fn refresh(&mut self, cluster: &mut Cluster) {
        if self.layout == Some(cluster.layout()) {
            return;
        }
        self.layout = Some(cluster.layout());
        self.samples.refresh(cluster);
        self.of_nodes.clear();
        self.impossible.clear();
    }

    fn set_impossible(&mut self, pod: &PodUid) {
        if self.impossible.len() >= MAX_IMPOSSIBLE {
            self.impossible.clear();
        }
        self.impossible.insert(pod.clone());
    }

    /// Drops the impossible pods after a change of DeviceClasses.
    pub(super) fn forget_impossible(&mut self) {
        self.impossible.clear();
    }

    fn types(&self) -> BTreeSet<GpuType> {
        self.samples.samples().iter().map(|sample| sample.kind).collect()
    }

    /// Returns the number of GPUs, the average share of each, and the types that all requests
    /// accept; `None` if some request accepts no type.
    fn of_shape(
        &self,
        shape: &mut Shape,
        cluster: &mut Cluster,
        selections: &mut Selections,
        steps: &mut u64,
    ) -> Result<Option<(u32, GpuFraction, BTreeSet<GpuType>)>, OutOfSteps> {
        let (mut gpus, mut total, mut types) = (0_u64, 0_u64, self.types());
        let requests: Vec<_> = shape
            .claims
            .iter()
            .flat_map(|claim| (0..claim.len()).map(|r| claim.alternatives(r)))
            .collect();
        for indices in requests {
            let mut found = Vec::new();
            for sample in self.samples.samples() {
                let served = serves(shape, &indices, sample, cluster, selections, steps)?;
                found
                    .extend(served.map(|(count, share)| {
                        (sample.kind, count, u64::from(share.thousandths()))
                    }));
            }
            let Some((_, count, _)) = found.first().copied() else { return Ok(None) };
            let share = found.iter().map(|(_, _, share)| share).sum::<u64>() / found.len() as u64;
            gpus = gpus.saturating_add(count);
            total = total.saturating_add(count.saturating_mul(share));
            types.retain(|kind| found.iter().any(|(accepted, _, _)| accepted == kind));
        }
        let Some(share) = total.checked_div(gpus) else { return Ok(None) };
        let share = u32::try_from(share).unwrap_or(u32::MAX);
        Ok(Some((u32::try_from(gpus).unwrap_or(u32::MAX), GpuFraction::new(share), types)))
    }

    /// Returns the GPU types on the nodes that the pod selects; `None` if it selects none.
    fn of_nodes(
        &mut self,
        scheduling: &Arc<SchedulingConstraints>,
        cluster: &Cluster,
    ) -> Option<&BTreeSet<GpuType>> {
        let affinity = scheduling.affinity.as_ref();
        // Pods bound to one node each, as those of a DaemonSet, carry no information about types.
        let is_bound = affinity
            .is_some_and(|affinity| affinity.terms.iter().any(|term| !term.fields.is_empty()));
        if is_bound || scheduling.node_selector.is_empty() && affinity.is_none() {
            return None;
        }
        let is_same = |known: &SchedulingConstraints| {
            known.node_selector == scheduling.node_selector && known.affinity == scheduling.affinity
        };
        let known = self.of_nodes.iter().position(|(known, _)| is_same(known));
        let at = known.unwrap_or_else(|| {
            if self.of_nodes.len() == MAX_CACHED {
                self.of_nodes.remove(0);
            }
            let nodes =
                cluster.by_name().filter(|(_, node)| predicate::is_selected(scheduling, node));
            let types = nodes.flat_map(|(index, _)| self.samples.types_of(index));
            let types = types.collect();
            self.of_nodes.push((Arc::clone(scheduling), types));
            self.of_nodes.len() - 1
        });
        Some(&self.of_nodes[at].1)
    }
}

/// Returns the number of devices of the request with these alternatives and the share of each, if
/// the first alternative that the sample can serve gets devices like it; `None` if it serves none.
fn serves(
    shape: &mut Shape,
    alternatives: &Range<usize>,
    sample: &Sample,
    cluster: &mut Cluster,
    selections: &mut Selections,
    steps: &mut u64,
) -> Result<Option<(u64, GpuFraction)>, OutOfSteps> {
    let Some((reachable, interner, features)) = cluster.search_inputs(sample.node) else {
        return Ok(None);
    };
    shape.resolve_profiles(std::iter::once(sample.profile), interner, features);
    let candidate = &reachable.candidates[sample.candidate];
    for index in alternatives.clone() {
        let alternative = &shape.alternatives[index];
        let Ok(resolved) = &alternative.resolved else { continue };
        let whole = &interner.profile(sample.profile).capacity;
        let share = of_device(alternative, sample.profile, whole, candidate.device());
        let Some(share) = share else { continue };
        match selections.selects(resolved.selection, candidate, interner, steps) {
            Selects::Yes => {
                let count = alternative.count().unwrap_or(reachable.candidates.len() as u64);
                return Ok(Some((count, share)));
            }
            Selects::No | Selects::Failed(_) => {}
            Selects::OutOfSteps => return Err(OutOfSteps),
        }
    }
    Ok(None)
}

/// Returns the requested share of a device; `None` if it cannot serve the request.
///
/// The profile must be resolved.
fn of_device(
    alternative: &AlternativeShape,
    profile: ProfileId,
    whole: &[i128],
    device: &Device,
) -> Option<GpuFraction> {
    let is_possible =
        alternative.accepts_oversubscription_of(device) && alternative.can_share(device);
    match &alternative.profile_match(profile).filter(|_| is_possible)?.demand {
        ProfileDemand::Takes(demand, true) if device.shared => Some(share(demand, whole)),
        ProfileDemand::Takes(_, true) => Some(GpuFraction::WHOLE),
        _ => None,
    }
}
