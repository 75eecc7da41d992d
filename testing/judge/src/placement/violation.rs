//! Holds a placer to the rules, with books that are not the placer's.

use super::cluster::{Cluster, Demand, Impossible, Placement};
use super::placer::Placer;

/// A placer broke a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// It refused a pod for which there was room.
    #[error("refused a pod that fits: {0:?}")]
    Refused(Demand),
    /// It placed a pod where there was no room.
    #[error("placed a pod where it cannot be ({problem}): {demand:?} at {placement:?}")]
    Placed {
        /// The pod.
        demand: Demand,
        /// Where.
        placement: Placement,
        /// Why it cannot be there.
        problem: Impossible,
    },
}

/// A placer, and the cluster as its placements leave it.
#[derive(Debug)]
pub struct Audit<'p, P> {
    cluster: Cluster,
    capacity_milli: u64,
    placer: &'p mut P,
}

impl<'p, P: Placer> Audit<'p, P> {
    /// The placer must believe in the same empty cluster.
    pub fn new(cluster: Cluster, placer: &'p mut P) -> Self {
        Self { capacity_milli: cluster.left_milli(), cluster, placer }
    }

    /// Has a pod placed. `None` = there was no room for it.
    ///
    /// # Errors
    /// If that breaks a rule.
    pub fn place(&mut self, demand: &Demand) -> Result<Option<Placement>, Violation> {
        let Some(placement) = self.placer.place(demand) else {
            return if self.cluster.fits(demand) {
                Err(Violation::Refused(*demand))
            } else {
                Ok(None)
            };
        };
        match self.cluster.take(demand, &placement) {
            Ok(()) => Ok(Some(placement)),
            Err(problem) => Err(Violation::Placed { demand: *demand, placement, problem }),
        }
    }

    /// A pod goes.
    pub fn release(&mut self, demand: &Demand, placement: &Placement) {
        self.cluster.give_back(demand, placement);
        self.placer.release(demand, placement);
    }

    /// How much of the GPUs is allocated, in percent.
    #[expect(clippy::cast_precision_loss, reason = "fewer than 2^52 thousandths of a GPU")]
    #[must_use]
    pub fn allocated_percent(&self) -> f64 {
        100.0 - 100.0 * self.cluster.left_milli() as f64 / self.capacity_milli as f64
    }

    /// The cluster as it is.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }
}

#[cfg(test)]
mod tests {
    use super::super::cluster::{ModelSet, Node};
    use super::*;

    /// Does what it is told, whatever that is.
    struct Always(Option<Placement>);

    impl Placer for Always {
        fn place(&mut self, _: &Demand) -> Option<Placement> {
            self.0.clone()
        }

        fn release(&mut self, _: &Demand, _: &Placement) {}
    }

    fn cluster() -> Cluster {
        let node =
            Node { cpu_milli: 8000, memory_mib: 100, gpus: vec![1000, 1000], model: ModelSet::ANY };
        Cluster::new(vec![node])
    }

    fn demand(gpus: usize, gpu_milli: u32) -> Demand {
        Demand { cpu_milli: 1000, memory_mib: 1, gpus, gpu_milli, models: ModelSet::ANY }
    }

    fn placing(gpus: &[usize]) -> Always {
        Always(Some(Placement { node: 0, gpus: gpus.to_vec() }))
    }

    #[test]
    fn a_refusal_counts_only_when_there_is_no_room() {
        let mut never = Always(None);
        let mut audit = Audit::new(cluster(), &mut never);
        assert_eq!(audit.place(&demand(3, 1000)), Ok(None));
        assert_eq!(audit.place(&demand(2, 1000)), Err(Violation::Refused(demand(2, 1000))));
    }

    #[test]
    fn nothing_is_placed_twice_on_what_is_there_once() {
        let mut first = placing(&[0]);
        let mut audit = Audit::new(cluster(), &mut first);
        assert!(audit.place(&demand(1, 600)).is_ok());
        assert!((audit.allocated_percent() - 30.0).abs() < 1e-9);
        let second = audit.place(&demand(1, 600));
        assert!(matches!(second, Err(Violation::Placed { problem: Impossible::DoesNotFit, .. })));
        let (pod, placement) = (demand(1, 600), Placement { node: 0, gpus: vec![0] });
        audit.release(&pod, &placement);
        assert!(audit.place(&pod).is_ok());
    }

    #[test]
    fn a_set_of_gpus_is_as_large_as_was_asked_for_and_has_none_twice() {
        for wrong in [&[0][..], &[0, 0], &[0, 2], &[0, 1, 1]] {
            let mut placer = placing(wrong);
            let placed = Audit::new(cluster(), &mut placer).place(&demand(2, 1000));
            assert!(
                matches!(placed, Err(Violation::Placed { problem: Impossible::NoSuchGpus, .. })),
                "{wrong:?}"
            );
        }
    }
}
