//! kube-scheduler: one pod after the other, and for some no node.

use std::collections::BTreeMap;
use std::time::Duration;

use tessera_controller::core::clock::Moment;
use tessera_controller::core::effect::BarrierOutcome;

use super::api_server::{ApiServer, Happening};
use super::{Agenda, WATCH_LAG};
use crate::random::Random;

/// Time for one pod: 250 pods a second, as it was measured with claims (docs/benchmarks).
const PER_POD: Duration = Duration::from_millis(4);

/// Of how many attempts one finds no node, for lack of CPU that other pods have taken.
const REFUSES_ONE_OF: usize = 500;

/// Pause before a pod without a node is tried again.
const BACKOFF: Duration = Duration::from_secs(10);

/// Time between two looks at binding conditions.
const POLL: Duration = Duration::from_secs(5);

/// Time from the reservation until a pod without binding conditions is bound.
const BIND: Duration = Duration::from_millis(20);

/// kube-scheduler.
pub(super) struct KubeScheduler {
    /// The end of its work for the pods in its queue.
    free_at: Moment,
    random: Random,
}

impl KubeScheduler {
    pub(super) fn new(seed: u64) -> Self {
        Self { free_at: Moment::START, random: Random::new(seed ^ 0x5eed) }
    }

    /// Queues a pod that has got devices.
    pub(super) fn enqueue(&mut self, pod: String, agenda: &mut Agenda, from: Moment) {
        self.free_at = self.free_at.max(from + WATCH_LAG) + PER_POD;
        agenda.add(self.free_at, Happening::Scheduled(pod));
    }

    /// Looks for a node for a pod.
    pub(super) fn schedule(
        &mut self,
        pod: &str,
        api: &mut ApiServer,
        agenda: &mut Agenda,
        now: Moment,
        counts: &mut BTreeMap<&'static str, u64>,
    ) {
        let waits = |one: &&super::api_server::Stored| !one.is_bound() && !one.is_ending();
        let Some(found) = api.get(pod).filter(waits).filter(|one| !one.results().is_empty()) else {
            return;
        };
        let is_at_once = found.barrier() == Some(BarrierOutcome::Complete);
        if self.random.below(REFUSES_ONE_OF) == 0 {
            *counts.entry("refused by kube-scheduler").or_default() += 1;
            api.refuse(pod, agenda, now);
            self.enqueue(pod.to_owned(), agenda, now + BACKOFF);
            return;
        }
        api.reserve(pod, true, agenda, now);
        agenda.add(now + if is_at_once { BIND } else { POLL }, Happening::Polled(pod.to_owned()));
    }

    /// Looks at the binding conditions of a pod. Returns true if it is bound now.
    pub(super) fn poll(
        &mut self,
        pod: &str,
        api: &mut ApiServer,
        agenda: &mut Agenda,
        now: Moment,
    ) -> bool {
        let Some(found) = api.get(pod).filter(|one| !one.is_bound()) else { return false };
        if found.results().is_empty() || found.is_ending() {
            return false;
        }
        match found.barrier() {
            None => agenda.add(now + POLL, Happening::Polled(pod.to_owned())),
            Some(BarrierOutcome::Failed) => api.reserve(pod, false, agenda, now),
            Some(BarrierOutcome::Complete) => {
                api.bind(pod, agenda, now);
                return true;
            }
        }
        false
    }
}
