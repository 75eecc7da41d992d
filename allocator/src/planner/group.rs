//! Groups of pods in a planning pass: all pods of a group are placed, or none.
//!
//! The pods are placed one after the other, each with what those before it have left. If one does
//! not fit, the pass is rolled back, and the group is tried again with this pod first: of pods with
//! unequal claims, the one that is hardest to place comes first. A pod that does not fit although
//! it is the first has the reasons of its class; the others of the group have
//! [`RefusalCause::GroupDoesNotFit`].
//!
//! A group whose reservation window is open keeps what fits for the rest of the pass, so pods that
//! come later do not take it.

use std::sync::Arc;

use tessera_api::names::Namespace;

use super::pass::{PlanningPass, Refused};
use super::pod_to_place::PodToPlace;
use crate::model::PendingPod;
use crate::outcome::{Decision, GroupShortfall, Refusal, RefusalCause};
use crate::quota::QuotaState;

/// The most orders in which the pods of a group are tried.
const MAX_ORDERS: usize = 4;

/// The state of a pass before the pods of a group.
struct Mark {
    usage: usize,
    cpu: usize,
    nodes: usize,
    /// Quotas of the namespace of the group.
    quotas: Option<(Namespace, Vec<QuotaState>)>,
}

/// A group of which a pod was refused.
struct Shortfall {
    /// Decisions about the pods before it, which count in the pass.
    placed: Vec<Decision>,
    /// Place of the refused pod in the order.
    at: usize,
    refused: Refused,
}

impl<'p> PlanningPass<'p> {
    /// Places all pods of a group.
    ///
    /// # Errors
    /// One does not fit beside the others. The refusals are those of all pods of the group.
    pub(super) fn place_group(
        &mut self,
        group: &'p PendingPod,
        steps: &mut u64,
    ) -> Result<Vec<Decision>, Refused> {
        let mut order: Vec<&'p PendingPod> = group.members().collect();
        let mut placed = 0;
        for attempt in 1.. {
            let mark = self.mark(group);
            let shortfall = match self.place_in_order(&order, steps) {
                Ok(decisions) => return Ok(decisions),
                Err(shortfall) => shortfall,
            };
            let Shortfall { placed: decisions, at, refused } = shortfall;
            placed = placed.max(decisions.len());
            let is_undecided = refused.is_undecided();
            let refused_pod = order[at];
            let is_last = decisions.is_empty()
                || is_undecided
                || attempt == MAX_ORDERS
                || self.compare_classes(order[0], refused_pod);
            if !is_last {
                self.roll_back(mark, &decisions);
                order[..=at].rotate_right(1);
                continue;
            }
            if is_undecided || !self.keeps_what_fits(group) {
                self.roll_back(mark, &decisions);
            }
            if is_undecided {
                return Err(self.undecided_group(group));
            }
            let shortfall =
                GroupShortfall { pods: order.len(), placed, first: refused_pod.name.clone() };
            return Err(self.refuse_group(group, refused_pod, refused, shortfall));
        }
        Ok(Vec::new())
    }

    /// Places the pods in this order.
    fn place_in_order(
        &mut self,
        order: &[&'p PendingPod],
        steps: &mut u64,
    ) -> Result<Vec<Decision>, Shortfall> {
        let mut placed = Vec::new();
        for (at, pod) in order.iter().enumerate() {
            match self.place_pod(pod, Some(placed.len()), steps) {
                Ok(decision) => placed.extend(decision),
                Err(refused) => return Err(Shortfall { placed, at, refused }),
            }
        }
        Ok(placed)
    }

    /// Classifies two pods. Returns true if they have equal claims and constraints, so that their
    /// order does not matter.
    fn compare_classes(&mut self, a: &PendingPod, b: &PendingPod) -> bool {
        let policy = self.settings.policy;
        let [a, b] = [a, b].map(|pod| {
            let claims = PodToPlace::all_of(pod).pending;
            self.planner.class_of(pod, &claims, policy)
        });
        a == b
    }

    /// Returns true if the reservation window of the group is open: what fits is kept for it.
    fn keeps_what_fits(&mut self, group: &PendingPod) -> bool {
        let until = self.open_window(group);
        self.reservation.keep_for_group(until);
        until.is_some()
    }

    /// Returns the refusals of a group in which `refused_pod` was refused.
    fn refuse_group(
        &self,
        group: &PendingPod,
        refused_pod: &PendingPod,
        refused: Refused,
        shortfall: GroupShortfall,
    ) -> Refused {
        let cause = Arc::new(RefusalCause::GroupDoesNotFit(shortfall));
        let mut claims = Vec::new();
        for pod in group.members() {
            if pod.uid == refused_pod.uid && !refused.claims.is_empty() {
                claims.extend(refused.claims.iter().cloned());
            } else {
                claims.extend(self.undecided_part(pod).refused_for(&cause));
            }
        }
        claims.into()
    }

    /// Refuses all pods of a group because the steps were spent.
    fn undecided_group(&self, group: &PendingPod) -> Refused {
        let claims: Vec<Refusal> =
            group.members().flat_map(|pod| self.undecided_part(pod).undecided()).collect();
        claims.into()
    }

    fn mark(&self, group: &PendingPod) -> Mark {
        let of_namespace = self.planner.quotas.get_key_value(&group.namespace);
        Mark {
            usage: self.usage_before.len(),
            cpu: self.cpu_before.len(),
            nodes: self.nodes_before.len(),
            quotas: of_namespace.map(|(name, quotas)| (name.clone(), quotas.clone())),
        }
    }

    /// Undoes these decisions, which are all since the mark and of one namespace.
    fn roll_back(&mut self, mark: Mark, decisions: &[Decision]) {
        for (device, used) in self.usage_before.drain(mark.usage..).rev() {
            self.planner.cluster.set_use(&device, used.as_ref());
        }
        for (node, cpu) in self.cpu_before.drain(mark.cpu..).rev() {
            self.planner.cluster.set_cpu(node, cpu);
            self.planner.cluster.touch(node);
        }
        for (node, before) in self.nodes_before.drain(mark.nodes..).rev() {
            match before {
                Some(before) => self.nodes.insert(node, before),
                None => self.nodes.remove(&node),
            };
        }
        for decision in decisions {
            for allocation in &decision.claims {
                self.decided.remove(&allocation.claim);
            }
        }
        if let Some((namespace, quotas)) = mark.quotas {
            self.planner.quotas.insert(namespace, quotas);
        }
    }
}
