//! Forecast of future requests: the mix of the requests seen so far.
//!
//! Each pod is counted once when it is first seen, and once more when it is refused for lack of
//! capacity.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::FastMap;
use crate::fragmentation::{GpuRequest, Potential, RequestMixLearner};
use crate::model::PodUid;

/// Maximum number of pods remembered as counted, unless more of them are pending.
const MAX_COUNTED: usize = 100_000;

/// Forecast of future requests, learned from the pods seen.
#[derive(Debug, Default)]
pub(crate) struct Forecast {
    learner: RequestMixLearner,
    /// Counted pods; not every plan contains all pending pods.
    counted: FastMap<PodUid, Counted>,
    /// Number of changes of the potential.
    generation: u64,
}

#[derive(Debug, Clone, Copy)]
struct Counted {
    request: GpuRequest,
    refused: bool,
}

impl Forecast {
    /// Returns the fragmentation potential for the forecast.
    pub(crate) fn potential(&self) -> &Potential {
        self.learner.potential()
    }

    /// Returns the generation of the potential, starting at 1. Ranks of an older generation are
    /// outdated.
    pub(crate) fn generation(&self) -> u64 {
        self.generation + 1
    }

    /// Returns true if the pod was not counted yet.
    pub(crate) fn is_new(&self, pod: &PodUid) -> bool {
        !self.counted.contains_key(pod)
    }

    /// Counts these pods. If too many pods are remembered, drops those that are not `pending`.
    pub(crate) fn observe<'p>(
        &mut self,
        new: BTreeMap<PodUid, GpuRequest>,
        pending: impl FnOnce() -> BTreeSet<&'p PodUid>,
    ) {
        if self.counted.len() > MAX_COUNTED {
            let waiting = pending();
            self.counted.retain(|pod, _| waiting.contains(pod));
        }
        for (pod, request) in new {
            self.generation += u64::from(self.learner.observe(request));
            self.counted.insert(pod, Counted { request, refused: false });
        }
    }

    /// Returns true if the pod was counted, but not its refusal.
    pub(crate) fn lacks_refusal(&self, pod: &PodUid) -> bool {
        self.counted.get(pod).is_some_and(|counted| !counted.refused)
    }

    /// Counts the refusal of a pod for lack of capacity, once per pod.
    pub(crate) fn count_refusal(&mut self, pod: &PodUid) {
        if let Some(counted) = self.counted.get_mut(pod).filter(|counted| !counted.refused) {
            counted.refused = true;
            self.learner.observe_refusal(counted.request);
        }
    }
}
