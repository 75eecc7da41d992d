//! Checks a placer's decisions with an independent record of the cluster.

use super::cluster::{Cluster, Demand, Placement, PlacementError};
use super::placer::Placer;

/// Error of a placer that violates a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The placer rejected a pod that fits.
    #[error("rejected a pod that fits: {0:?}")]
    Rejected(Demand),
    /// The placer placed a pod where it does not fit.
    #[error("invalid placement ({problem}): {demand:?} at {placement:?}")]
    Placed {
        /// The pod's demand.
        demand: Demand,
        /// The placement.
        placement: Placement,
        /// Reason of the error.
        problem: PlacementError,
    },
}

/// A placer with the cluster that results from its placements.
pub struct Audit<'p> {
    cluster: Cluster,
    capacity_milli: u64,
    placer: &'p mut dyn Placer,
}

impl<'p> Audit<'p> {
    /// Returns the audit of a placer, which must start with the same empty cluster.
    pub fn new(cluster: Cluster, placer: &'p mut dyn Placer) -> Self {
        Self { capacity_milli: cluster.left_milli(), cluster, placer }
    }

    /// Lets the placer place a pod. Returns `None` if the pod fits nowhere.
    ///
    /// # Errors
    /// Returns an error if the decision violates a rule.
    pub fn place(&mut self, demand: &Demand) -> Result<Option<Placement>, Violation> {
        let Some(placement) = self.placer.place(demand) else {
            return if self.cluster.fits(demand) {
                Err(Violation::Rejected(*demand))
            } else {
                Ok(None)
            };
        };
        match self.cluster.allocate(demand, &placement) {
            Ok(()) => Ok(Some(placement)),
            Err(problem) => Err(Violation::Placed { demand: *demand, placement, problem }),
        }
    }

    /// Releases the resources of a pod.
    pub fn release(&mut self, demand: &Demand, placement: &Placement) {
        self.cluster.release(demand, placement);
        self.placer.release(demand, placement);
    }

    /// Returns the allocated share of the GPUs in percent.
    #[expect(clippy::cast_precision_loss, reason = "fewer than 2^52 thousandths of a GPU")]
    #[must_use]
    pub fn allocated_percent(&self) -> f64 {
        100.0 - 100.0 * self.cluster.left_milli() as f64 / self.capacity_milli as f64
    }
}

#[cfg(test)]
mod tests {
    use super::super::cluster::{ModelSet, Node};
    use super::*;

    /// A placer that always returns the same placement.
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
    fn rejection_is_valid_only_if_nothing_fits() {
        let mut never = Always(None);
        let mut audit = Audit::new(cluster(), &mut never);
        assert_eq!(audit.place(&demand(3, 1000)), Ok(None));
        assert_eq!(audit.place(&demand(2, 1000)), Err(Violation::Rejected(demand(2, 1000))));
    }

    #[test]
    fn gpu_is_not_allocated_beyond_its_capacity() {
        let mut first = placing(&[0]);
        let mut audit = Audit::new(cluster(), &mut first);
        assert!(audit.place(&demand(1, 600)).is_ok());
        assert!((audit.allocated_percent() - 30.0).abs() < 1e-9);
        let second = audit.place(&demand(1, 600));
        assert!(matches!(
            second,
            Err(Violation::Placed { problem: PlacementError::Insufficient, .. })
        ));
        let (pod, placement) = (demand(1, 600), Placement { node: 0, gpus: vec![0] });
        audit.release(&pod, &placement);
        assert!(audit.place(&pod).is_ok());
    }

    #[test]
    fn gpu_set_has_requested_size_without_duplicates() {
        for wrong in [&[0][..], &[0, 0], &[0, 2], &[0, 1, 1]] {
            let mut placer = placing(wrong);
            let placed = Audit::new(cluster(), &mut placer).place(&demand(2, 1000));
            assert!(
                matches!(
                    placed,
                    Err(Violation::Placed { problem: PlacementError::InvalidGpus, .. })
                ),
                "{wrong:?}"
            );
        }
    }
}
