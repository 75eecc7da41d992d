//! The cluster of a trace: remaining resources of each node.

use super::trace::{GpuMilli, NodeRow, PodRow, WHOLE};

/// A set of GPU models as bits of [`Models`]: those that a pod accepts, or the one of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelSet(u64);

impl ModelSet {
    /// All models, including unknown ones.
    pub const ANY: Self = Self(u64::MAX);

    /// Returns true if the sets have a common model.
    #[must_use]
    pub fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns the indexes into [`Models`] of the set's members.
    pub fn positions(self) -> impl Iterator<Item = usize> {
        (0..64).filter(move |bit| self.0 >> bit & 1 == 1)
    }
}

/// GPU models of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Models(Vec<String>);

impl Models {
    /// Returns the models of these nodes.
    ///
    /// # Panics
    /// Panics if there are more than 64 models.
    #[must_use]
    pub fn of(nodes: &[NodeRow]) -> Self {
        let mut names: Vec<String> = nodes.iter().map(|node| node.model.clone()).collect();
        names.sort();
        names.dedup();
        assert!(names.len() <= 64, "more than 64 GPU models in one cluster");
        Self(names)
    }

    /// Returns the names in the order of their indexes.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// Returns the set of the named models; unknown names are ignored.
    #[must_use]
    pub fn set<'a>(&self, names: impl Iterator<Item = &'a str>) -> ModelSet {
        let bit =
            |name: &str| self.0.iter().position(|known| known == name).map_or(0, |at| 1 << at);
        ModelSet(names.fold(0, |set, name| set | bit(name)))
    }
}

/// Resource demand of one pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Demand {
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Memory of the node, in MiB.
    pub memory_mib: u64,
    /// Number of GPUs.
    pub gpus: usize,
    /// Share of each GPU, in thousandths.
    pub gpu_milli: GpuMilli,
    /// Accepted models.
    pub models: ModelSet,
}

impl Demand {
    /// Returns the demand of a trace's pod, in a cluster with these models.
    #[must_use]
    pub fn of(pod: &PodRow, models: &Models) -> Self {
        let is_free = pod.models().next().is_none();
        Self {
            cpu_milli: pod.cpu_milli,
            memory_mib: pod.memory_mib,
            gpus: pod.num_gpu,
            gpu_milli: pod.gpu_milli,
            models: if is_free { ModelSet::ANY } else { models.set(pod.models()) },
        }
    }

    /// Returns true if the demand is a share of one GPU.
    #[must_use]
    pub fn is_share(&self) -> bool {
        self.gpus == 1 && self.gpu_milli < WHOLE
    }

    /// Returns the total demand in thousandths of a GPU.
    #[must_use]
    pub fn total_gpu_milli(&self) -> u64 {
        self.gpus as u64 * u64::from(self.gpu_milli)
    }
}

/// Remaining resources of a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Node {
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Remaining thousandths of each GPU.
    pub gpus: Vec<GpuMilli>,
    /// Model of its GPUs.
    pub model: ModelSet,
}

impl Node {
    /// Returns the empty node.
    #[must_use]
    pub fn empty(row: &NodeRow, models: &Models) -> Self {
        Self {
            cpu_milli: row.cpu_milli,
            memory_mib: row.memory_mib,
            gpus: vec![WHOLE; row.gpu],
            model: models.set(std::iter::once(row.model.as_str())),
        }
    }

    /// Returns true if the demand fits on the node.
    #[must_use]
    pub fn fits(&self, demand: &Demand) -> bool {
        self.cpu_milli >= demand.cpu_milli
            && self.memory_mib >= demand.memory_mib
            && (demand.gpus == 0
                || demand.models.intersects(self.model)
                    && self.gpus.iter().filter(|&&left| left >= demand.gpu_milli).count()
                        >= demand.gpus)
    }

    /// Returns the remaining thousandths of all GPUs of the node.
    #[must_use]
    pub fn total_gpu_milli(&self) -> u64 {
        self.gpus.iter().map(|&left| u64::from(left)).sum()
    }

    /// Returns the node after the demand got the GPUs of these indexes, on which it must fit.
    #[must_use]
    pub fn with(&self, demand: &Demand, gpus: &[usize]) -> Self {
        let mut after = self.clone();
        after.allocate(demand, gpus);
        after
    }

    fn allocate(&mut self, demand: &Demand, gpus: &[usize]) {
        self.cpu_milli -= demand.cpu_milli;
        self.memory_mib -= demand.memory_mib;
        for &gpu in gpus {
            self.gpus[gpu] -= demand.gpu_milli;
        }
    }

    fn release(&mut self, demand: &Demand, gpus: &[usize]) {
        self.cpu_milli += demand.cpu_milli;
        self.memory_mib += demand.memory_mib;
        for &gpu in gpus {
            self.gpus[gpu] += demand.gpu_milli;
        }
    }
}

/// Placement of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Index of the node.
    pub node: usize,
    /// Indexes of its GPUs, one for each requested GPU.
    pub gpus: Vec<usize>,
}

/// Error of an invalid placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// The node or a GPU does not exist, the number of GPUs is wrong, or a GPU is listed twice.
    #[error("invalid set of GPUs")]
    InvalidGpus,
    /// The resources are insufficient.
    #[error("insufficient resources")]
    Insufficient,
}

/// All nodes with their remaining resources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    nodes: Vec<Node>,
    left_milli: u64,
}

impl Cluster {
    /// Returns a cluster of these nodes.
    #[must_use]
    pub fn new(nodes: Vec<Node>) -> Self {
        let left_milli = nodes.iter().map(Node::total_gpu_milli).sum();
        Self { nodes, left_milli }
    }

    /// Returns the empty cluster of a trace.
    #[must_use]
    pub fn empty(rows: &[NodeRow], models: &Models) -> Self {
        Self::new(rows.iter().map(|row| Node::empty(row, models)).collect())
    }

    /// Returns the nodes.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the remaining thousandths of all GPUs.
    #[must_use]
    pub fn left_milli(&self) -> u64 {
        self.left_milli
    }

    /// Returns true if the demand fits on any node.
    #[must_use]
    pub fn fits(&self, demand: &Demand) -> bool {
        self.nodes.iter().any(|node| node.fits(demand))
    }

    /// Allocates the resources of a placement.
    ///
    /// # Errors
    /// Returns an error if the placement is invalid; nothing is allocated then.
    pub fn allocate(
        &mut self,
        demand: &Demand,
        placement: &Placement,
    ) -> Result<(), PlacementError> {
        let node = self.nodes.get_mut(placement.node).ok_or(PlacementError::InvalidGpus)?;
        let is_set =
            placement.gpus.iter().enumerate().all(|(i, gpu)| !placement.gpus[..i].contains(gpu));
        if placement.gpus.len() != demand.gpus
            || !is_set
            || placement.gpus.iter().any(|&g| g >= node.gpus.len())
        {
            return Err(PlacementError::InvalidGpus);
        }
        if !node.fits(demand) || placement.gpus.iter().any(|&gpu| node.gpus[gpu] < demand.gpu_milli)
        {
            return Err(PlacementError::Insufficient);
        }
        node.allocate(demand, &placement.gpus);
        self.left_milli -= demand.total_gpu_milli();
        Ok(())
    }

    /// Releases the resources of a placement.
    pub fn release(&mut self, demand: &Demand, placement: &Placement) {
        self.nodes[placement.node].release(demand, &placement.gpus);
        self.left_milli += demand.total_gpu_milli();
    }
}
