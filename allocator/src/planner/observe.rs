//! What a pod asks for, in the terms of [`fragmentation`](crate::fragmentation).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Planner;
use crate::cluster::{Cluster, NodeIndex, OfferId};
use crate::fragmentation::{GpuMilli, GpuType, GpuTypes, Request};
use crate::model::{Claim, Device, PendingPod, PodUid, Scheduling, cpu_milli_of};
use crate::policy::{Policy, share};
use crate::predicate;
use crate::search::MAX_RESULTS;
use crate::shape::{AlternativeShape, OfferDemand, Selections, Shape};

/// Answers to "on the nodes of which types of GPU" that are kept.
const MAX_KEPT: usize = 64;

/// Which types of GPU there are, and which of them pods accept. Holds as long as no node reaches
/// other devices.
#[derive(Debug, Default)]
pub(super) struct Accepted {
    layout: Option<u64>,
    /// One GPU of each type and offer.
    samples: Vec<Sample>,
    /// The types on the nodes that pods select.
    of_nodes: Vec<(Arc<Scheduling>, BTreeSet<GpuType>)>,
    /// Pods that ask for nothing that there could be.
    impossible: BTreeSet<PodUid>,
}

/// Steps that finding out what one pod asks for counts as, besides evaluating selectors: about as
/// much as looking at so many devices.
const STEPS_PER_REQUEST: u64 = 10;

/// Pods known to ask for nothing that there could be. Beyond, all are looked at again.
const MAX_IMPOSSIBLE: usize = 100_000;

#[derive(Debug, Clone, Copy)]
struct Sample {
    node: NodeIndex,
    candidate: usize,
    kind: GpuType,
    offer: OfferId,
}

impl Planner {
    /// Counts the requests of the pods that have not been counted, if some policy goes by what is
    /// expected. Where the steps end, the rest is left to the next time.
    pub(super) fn observe(&mut self, pods: &[&PendingPod], policy: Policy, steps: &mut u64) {
        if !policy.looks_ahead() && !self.cluster.is_cpu_ranked() {
            return;
        }
        let waiting: BTreeSet<_> = pods.iter().map(|pod| &pod.uid).collect();
        self.accepted.refresh(&mut self.cluster);
        let is_new = |pod: &&&PendingPod| {
            self.forecast.is_new(&pod.uid) && !self.accepted.impossible.contains(&pod.uid)
        };
        let new = pods.iter().filter(is_new).copied().collect::<Vec<_>>();
        let mut requests = BTreeMap::new();
        for pod in new {
            if *steps == 0 {
                break;
            }
            match self.request(pod, policy, steps) {
                Some(request) => drop(requests.insert(pod.uid.clone(), request)),
                None => self.accepted.set_impossible(&pod.uid),
            }
            *steps = steps.saturating_sub(STEPS_PER_REQUEST);
        }
        self.forecast.observe(requests, &waiting);
    }

    /// What the pod asks for; none where it asks for nothing that there could be.
    fn request(&mut self, pod: &PendingPod, policy: Policy, steps: &mut u64) -> Option<Request> {
        let mut pending: Vec<Arc<Claim>> = pod.pending_claims().cloned().collect();
        let mut known = BTreeSet::new();
        pending.retain(|claim| known.insert(claim.uid.clone()));
        let cpu_milli = cpu_milli_of(&pod.scheduling.requests);
        let Self { cluster, selections, shapes, accepted, .. } = self;
        let shape = shapes.of(&pending, cpu_milli, cluster, selections, policy);
        let (gpus, share, mut types) =
            accepted.of_shape(&mut shapes.get_mut(shape).shape, cluster, selections, steps)?;
        if let Some(of_nodes) = accepted.of_nodes(&pod.scheduling, cluster) {
            types.retain(|kind| of_nodes.contains(kind));
        }
        // What no claim can hold will never be served.
        if types.is_empty() || gpus as usize > MAX_RESULTS * pending.len() {
            return None;
        }
        let is_any = types.len() == accepted.types().len();
        let types = if is_any { GpuTypes::ANY } else { GpuTypes::of(types) };
        Some(Request { cpu_milli, gpus, share, types })
    }
}

impl Accepted {
    fn refresh(&mut self, cluster: &mut Cluster) {
        if self.layout == Some(cluster.layout()) {
            return;
        }
        let mut known = BTreeSet::new();
        *self = Self { layout: Some(cluster.layout()), ..Self::default() };
        for node in 0..cluster.nodes.len() {
            cluster.gather(node);
            let Some(reach) = cluster.reach(node) else { continue };
            for (candidate, found) in reach.candidates.iter().enumerate() {
                let compiled = found.compiled();
                let (kind, offer) = (compiled.kind, compiled.offer);
                if compiled.device.is_ours() && known.insert((kind, offer)) {
                    self.samples.push(Sample { node, candidate, kind, offer });
                }
            }
        }
    }

    fn set_impossible(&mut self, pod: &PodUid) {
        if self.impossible.len() >= MAX_IMPOSSIBLE {
            self.impossible.clear();
        }
        self.impossible.insert(pod.clone());
    }

    /// Classes have changed: what could not be may be possible now.
    pub(super) fn forget_impossible(&mut self) {
        self.impossible.clear();
    }

    fn types(&self) -> BTreeSet<GpuType> {
        self.samples.iter().map(|sample| sample.kind).collect()
    }

    /// How many GPUs, how much of each on average, and the types that all requests accept.
    fn of_shape(
        &self,
        shape: &mut Shape,
        cluster: &mut Cluster,
        selections: &mut Selections,
        steps: &mut u64,
    ) -> Option<(u32, GpuMilli, BTreeSet<GpuType>)> {
        let (mut gpus, mut total, mut types) = (0_u64, 0_u64, self.types());
        let requests: Vec<_> = shape
            .claims
            .iter()
            .flat_map(|claim| (0..claim.len()).map(|r| claim.alternatives(r)))
            .collect();
        for places in requests {
            let mut found: Vec<(GpuType, u64, u64)> = Vec::new();
            for sample in &self.samples {
                let (reach, interner, features) = cluster.parts(sample.node)?;
                shape.meet_offers(std::iter::once(sample.offer), interner, features);
                let candidate = &reach.candidates[sample.candidate];
                let served = places.clone().find_map(|place| {
                    let asked = &shape.alternatives[place];
                    let resolved = asked.resolved.as_ref().ok()?;
                    let selected =
                        selections.selects(resolved.selection, candidate, interner, steps);
                    let whole = &interner.offer(sample.offer).capacity;
                    let share = of_device(asked, sample.offer, whole, candidate.device())?;
                    let count = asked.count().unwrap_or(reach.candidates.len() as u64);
                    (selected == Ok(true)).then_some((count, share))
                });
                found
                    .extend(served.map(|(count, share)| {
                        (sample.kind, count, u64::from(share.thousandths()))
                    }));
            }
            let (_, count, _) = *found.first()?;
            let share = found.iter().map(|(_, _, share)| share).sum::<u64>() / found.len() as u64;
            gpus = gpus.saturating_add(count);
            total = total.saturating_add(count.saturating_mul(share));
            types.retain(|kind| found.iter().any(|(accepted, _, _)| accepted == kind));
        }
        let share = u32::try_from(total.checked_div(gpus)?).unwrap_or(u32::MAX);
        Some((u32::try_from(gpus).unwrap_or(u32::MAX), GpuMilli::new(share), types))
    }

    /// The types on the nodes that the pod selects by their labels; none where it selects by none.
    fn of_nodes(
        &mut self,
        scheduling: &Arc<Scheduling>,
        cluster: &Cluster,
    ) -> Option<&BTreeSet<GpuType>> {
        let affinity = scheduling.affinity.as_ref();
        // Pods that are tied to one node each, as those of a DaemonSet, say nothing of types.
        let is_tied = affinity
            .is_some_and(|affinity| affinity.terms.iter().any(|term| !term.fields.is_empty()));
        if is_tied || scheduling.node_selector.is_empty() && affinity.is_none() {
            return None;
        }
        let is_same = |known: &Scheduling| {
            known.node_selector == scheduling.node_selector && known.affinity == scheduling.affinity
        };
        let known = self.of_nodes.iter().position(|(known, _)| is_same(known));
        let at = known.unwrap_or_else(|| {
            if self.of_nodes.len() == MAX_KEPT {
                self.of_nodes.remove(0);
            }
            let nodes =
                cluster.by_name().filter(|(_, node)| predicate::is_selected(scheduling, node));
            let reached = nodes.filter_map(|(index, _)| cluster.reach(index));
            let types =
                reached.flat_map(|reach| reach.candidates.iter().map(|c| c.compiled().kind));
            self.of_nodes.push((Arc::clone(scheduling), types.collect()));
            self.of_nodes.len() - 1
        });
        Some(&self.of_nodes[at].1)
    }
}

/// How much of a device of an offer that has been met is asked for; none where it cannot be given.
fn of_device(
    asked: &AlternativeShape,
    offer: OfferId,
    whole: &[i128],
    device: &Device,
) -> Option<GpuMilli> {
    let may_have = asked.has_leave_for(device) && asked.can_share(device);
    match &asked.on(offer).filter(|_| may_have)?.demand {
        OfferDemand::Takes(demand, true) if device.shared => Some(share(demand, whole)),
        OfferDemand::Takes(_, true) => Some(GpuMilli::WHOLE),
        _ => None,
    }
}
