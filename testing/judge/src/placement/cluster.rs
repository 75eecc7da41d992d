//! The cluster of a trace: what each node has left, and what fits where.

use super::trace::{GpuMilli, NodeRow, PodRow, WHOLE};

/// The set of GPU models that a pod accepts, or the one that a node has, as bits of [`Models`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelSet(u64);

impl ModelSet {
    /// Every model, known or not.
    pub const ANY: Self = Self(u64::MAX);

    /// Whether the two have a model in common.
    #[must_use]
    pub fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The positions in [`Models`] of what is in the set.
    pub fn positions(self) -> impl Iterator<Item = usize> {
        (0..64).filter(move |bit| self.0 >> bit & 1 == 1)
    }
}

/// The models of a cluster's GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Models(Vec<String>);

impl Models {
    /// The models of these nodes.
    ///
    /// # Panics
    /// Beyond 64 different models.
    #[must_use]
    pub fn of(nodes: &[NodeRow]) -> Self {
        let mut names: Vec<String> = nodes.iter().map(|node| node.model.clone()).collect();
        names.sort();
        names.dedup();
        assert!(names.len() <= 64, "more than 64 models of GPU in one cluster");
        Self(names)
    }

    /// Their names, in the order of their positions.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// The set of those that are named; a name that no node has adds nothing.
    #[must_use]
    pub fn set<'a>(&self, names: impl Iterator<Item = &'a str>) -> ModelSet {
        let bit =
            |name: &str| self.0.iter().position(|known| known == name).map_or(0, |at| 1 << at);
        ModelSet(names.fold(0, |set, name| set | bit(name)))
    }
}

/// What one pod asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Demand {
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Memory of the node, in MiB.
    pub memory_mib: u64,
    /// How many GPUs.
    pub gpus: usize,
    /// How much of each of them.
    pub gpu_milli: GpuMilli,
    /// On which models.
    pub models: ModelSet,
}

impl Demand {
    /// What the row of a trace asks for, in a cluster with these models.
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

    /// Whether it asks for a part of one GPU.
    #[must_use]
    pub fn is_share(&self) -> bool {
        self.gpus == 1 && self.gpu_milli < WHOLE
    }

    /// All that it takes, in thousandths of a GPU.
    #[must_use]
    pub fn total_gpu_milli(&self) -> u64 {
        self.gpus as u64 * u64::from(self.gpu_milli)
    }
}

/// What a node has left.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Node {
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Of each GPU, thousandths.
    pub gpus: Vec<GpuMilli>,
    /// The model of its GPUs.
    pub model: ModelSet,
}

impl Node {
    /// The node, with nothing on it.
    #[must_use]
    pub fn empty(row: &NodeRow, models: &Models) -> Self {
        Self {
            cpu_milli: row.cpu_milli,
            memory_mib: row.memory_mib,
            gpus: vec![WHOLE; row.gpu],
            model: models.set(std::iter::once(row.model.as_str())),
        }
    }

    /// Whether the demand fits on it.
    #[must_use]
    pub fn fits(&self, demand: &Demand) -> bool {
        self.cpu_milli >= demand.cpu_milli
            && self.memory_mib >= demand.memory_mib
            && (demand.gpus == 0
                || demand.models.meets(self.model)
                    && self.gpus.iter().filter(|&&left| left >= demand.gpu_milli).count()
                        >= demand.gpus)
    }

    /// All that is left of its GPUs, in thousandths.
    #[must_use]
    pub fn total_gpu_milli(&self) -> u64 {
        self.gpus.iter().map(|&left| u64::from(left)).sum()
    }

    /// What is left after the demand got the GPUs of these indices. The demand must fit on them.
    #[must_use]
    pub fn with(&self, demand: &Demand, gpus: &[usize]) -> Self {
        let mut after = self.clone();
        after.take(demand, gpus);
        after
    }

    fn take(&mut self, demand: &Demand, gpus: &[usize]) {
        self.cpu_milli -= demand.cpu_milli;
        self.memory_mib -= demand.memory_mib;
        for &gpu in gpus {
            self.gpus[gpu] -= demand.gpu_milli;
        }
    }

    fn give_back(&mut self, demand: &Demand, gpus: &[usize]) {
        self.cpu_milli += demand.cpu_milli;
        self.memory_mib += demand.memory_mib;
        for &gpu in gpus {
            self.gpus[gpu] += demand.gpu_milli;
        }
    }
}

/// Where a pod went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Index of the node.
    pub node: usize,
    /// Indices of its GPUs, one for each that the pod asked for.
    pub gpus: Vec<usize>,
}

/// Why a placement cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Impossible {
    /// There is no such node or GPU, or the number of GPUs is not what was asked for, or one comes
    /// twice.
    #[error("no such set of GPUs")]
    NoSuchGpus,
    /// Something of it is not there.
    #[error("it does not fit")]
    DoesNotFit,
}

/// All nodes, and what each has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    nodes: Vec<Node>,
    left_milli: u64,
}

impl Cluster {
    /// These nodes.
    #[must_use]
    pub fn new(nodes: Vec<Node>) -> Self {
        let left_milli = nodes.iter().map(Node::total_gpu_milli).sum();
        Self { nodes, left_milli }
    }

    /// The nodes of a trace, with nothing on them.
    #[must_use]
    pub fn empty(rows: &[NodeRow], models: &Models) -> Self {
        Self::new(rows.iter().map(|row| Node::empty(row, models)).collect())
    }

    /// The nodes.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// What is left of all GPUs, in thousandths.
    #[must_use]
    pub fn left_milli(&self) -> u64 {
        self.left_milli
    }

    /// Whether there is a node on which the demand fits.
    #[must_use]
    pub fn fits(&self, demand: &Demand) -> bool {
        self.nodes.iter().any(|node| node.fits(demand))
    }

    /// Takes what the placement takes.
    ///
    /// # Errors
    /// If it cannot be; then nothing is taken.
    pub fn take(&mut self, demand: &Demand, placement: &Placement) -> Result<(), Impossible> {
        let node = self.nodes.get_mut(placement.node).ok_or(Impossible::NoSuchGpus)?;
        let is_set =
            placement.gpus.iter().enumerate().all(|(i, gpu)| !placement.gpus[..i].contains(gpu));
        if placement.gpus.len() != demand.gpus
            || !is_set
            || placement.gpus.iter().any(|&g| g >= node.gpus.len())
        {
            return Err(Impossible::NoSuchGpus);
        }
        if !node.fits(demand) || placement.gpus.iter().any(|&gpu| node.gpus[gpu] < demand.gpu_milli)
        {
            return Err(Impossible::DoesNotFit);
        }
        node.take(demand, &placement.gpus);
        self.left_milli -= demand.total_gpu_milli();
        Ok(())
    }

    /// Gives back what a placement took.
    pub fn give_back(&mut self, demand: &Demand, placement: &Placement) {
        self.nodes[placement.node].give_back(demand, &placement.gpus);
        self.left_milli += demand.total_gpu_milli();
    }
}
