//! What is expected of the requests to come: the mix of those that have been seen, each pod counted
//! once when it comes, and once more when there is no room for it.

use std::collections::{BTreeMap, BTreeSet};

use crate::fragmentation::{Learner, Potential, Request};
use crate::model::PodUid;

/// Pods that are known to have been counted, unless more of them wait.
const MAX_COUNTED: usize = 100_000;

/// What is expected of the requests to come.
#[derive(Debug, Default)]
pub(crate) struct Forecast {
    learner: Learner,
    /// Pods that have been counted. A pod that waits is not in every plan.
    counted: BTreeMap<PodUid, Counted>,
    /// How often the potential has changed, and one.
    generation: u64,
}

#[derive(Debug, Clone, Copy)]
struct Counted {
    request: Request,
    refused: bool,
}

impl Forecast {
    /// The potential that goes with what is known.
    pub(crate) fn potential(&self) -> &Potential {
        self.learner.potential()
    }

    /// What was ranked by the potential of another generation is not ranked any more.
    pub(crate) fn generation(&self) -> u64 {
        self.generation + 1
    }

    /// Whether the pod is still to be counted.
    pub(crate) fn is_new(&self, pod: &PodUid) -> bool {
        !self.counted.contains_key(pod)
    }

    /// Counts these pods. Where many are known, it forgets those that do not wait.
    pub(crate) fn observe(&mut self, new: BTreeMap<PodUid, Request>, waiting: &BTreeSet<&PodUid>) {
        if self.counted.len() > MAX_COUNTED {
            self.counted.retain(|pod, _| waiting.contains(pod));
        }
        for (pod, request) in new {
            self.generation += u64::from(self.learner.observe(request));
            self.counted.insert(pod, Counted { request, refused: false });
        }
    }

    /// There is no room for the pod now.
    pub(crate) fn refused(&mut self, pod: &PodUid) {
        if let Some(counted) = self.counted.get_mut(pod).filter(|counted| !counted.refused) {
            counted.refused = true;
            self.learner.refused(counted.request);
        }
    }
}
