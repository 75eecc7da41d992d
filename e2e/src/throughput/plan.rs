//! Workload, and the rounds of the benchmark in their order.

use std::fmt;

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

/// Allocator of the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Allocator {
    /// kube-scheduler: slices without the managed taint, no controller, the chart in `mode: stock`.
    Stock,
    /// tessera-controller: slices with the managed taint, the chart with its defaults.
    Tessera,
    /// tessera-controller with pods of five other systems, which its webhook converts.
    Dialects,
    /// tessera-controller with the native pods that those are as manifests: what `kubectl tessera
    /// convert` writes.
    Converted,
}

impl fmt::Display for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stock => "stock",
            Self::Tessera => "tessera",
            Self::Dialects => "dialects",
            Self::Converted => "converted",
        })
    }
}

/// Client-side request limits of kube-controller-manager and kube-scheduler, per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limits {
    /// Default limits: 20 and 50 requests per second, bursts of 30 and 100.
    Default,
    /// One limit for both the rate and bursts.
    PerSecond(u32),
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::PerSecond(requests) => write!(f, "{requests}"),
        }
    }
}

impl std::str::FromStr for Limits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse() {
            _ if text == "default" => Ok(Self::Default),
            Ok(requests) if requests > 0 => Ok(Self::PerSecond(requests)),
            _ => {
                Err("expected `default` or a number of requests per second, at least 1".to_owned())
            }
        }
    }
}

/// Workload of each round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Args)]
pub struct Workload {
    /// Number of pods, each with a claim from a template.
    #[arg(long, default_value_t = 500, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub pods: u32,
    /// Number of hollow nodes.
    #[arg(long, default_value_t = 300, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=5000))]
    pub nodes: u32,
    /// GPUs per node, of 80 GiB each.
    #[arg(long, default_value_t = 8, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub gpus: u32,
    /// Memory that a pod requests of one GPU, in GiB.
    #[arg(long, default_value_t = 20, value_name = "GIB", value_parser = clap::value_parser!(u32).range(1..=80))]
    pub memory: u32,
    /// Compute that a pod requests of one GPU, in percent.
    #[arg(long, default_value_t = 25, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub cores: u32,
    /// Pods created per second; by default as fast as the API server accepts them.
    #[arg(long, value_name = "PODS", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rate: Option<u32>,
}

/// Error for a workload that exceeds the capacity of the nodes.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{nodes} nodes with {gpus} GPUs have capacity for {capacity} pods of {memory} GiB and {cores} percent, fewer than --pods {pods}: raise \
     --nodes or --gpus, or lower --pods, --memory or --cores"
)]
pub struct InsufficientCapacity {
    nodes: u32,
    gpus: u32,
    memory: u32,
    cores: u32,
    capacity: u64,
    pods: u32,
}

impl Workload {
    /// Checks that the nodes have capacity for all pods.
    ///
    /// # Errors
    /// Returns an error if they do not.
    pub fn check(&self) -> Result<(), InsufficientCapacity> {
        let Self { pods, nodes, gpus, memory, cores, .. } = *self;
        let per_gpu = (80 / memory.max(1)).min(100_u32.checked_div(cores).unwrap_or(u32::MAX));
        let capacity = u64::from(nodes) * u64::from(gpus) * u64::from(per_gpu);
        if capacity < u64::from(pods) {
            Err(InsufficientCapacity { nodes, gpus, memory, cores, capacity, pods })
        } else {
            Ok(())
        }
    }
}

/// Selection of the rounds.
#[derive(Clone, Debug, Args)]
pub struct Rounds {
    /// Rounds per allocator and limit. They alternate as stock, tessera, tessera, stock.
    #[arg(long, default_value_t = 2, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Client limits of kube-controller-manager and kube-scheduler in requests per second. There
    /// is one result table per limit.
    #[arg(long, default_values = ["default", "5000"], value_delimiter = ',', value_name = "LIMIT,...")]
    pub limits: Vec<Limits>,
    /// Compare pods of other systems, which the webhook converts, with the native ones that are
    /// written for them, both with Tessera. They ask for amounts of their own.
    #[arg(long)]
    pub dialects: bool,
    /// Run only rounds with this allocator.
    #[arg(long, value_name = "ALLOCATOR")]
    pub only: Option<Allocator>,
}

impl Rounds {
    /// Returns the rounds in their order. They alternate, so a steady change on the machine affects
    /// both allocators equally.
    pub fn in_order(&self) -> Vec<(Allocator, Limits)> {
        let (first, second) = match self.dialects {
            true => (Allocator::Converted, Allocator::Dialects),
            false => (Allocator::Stock, Allocator::Tessera),
        };
        let turns = [first, second, second, first];
        let allocators: Vec<Allocator> =
            turns.into_iter().cycle().take(2 * self.rounds as usize).collect();
        let wanted = |allocator: &Allocator| self.only.is_none_or(|only| only == *allocator);
        let of_limits = |limits: &Limits| {
            let limits = *limits;
            allocators
                .iter()
                .copied()
                .filter(wanted)
                .map(move |allocator| (allocator, limits))
                .collect::<Vec<_>>()
        };
        self.limits.iter().flat_map(of_limits).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_alternate_between_allocators() {
        let rounds = Rounds {
            rounds: 2,
            limits: vec![Limits::Default, Limits::PerSecond(5000)],
            dialects: false,
            only: None,
        };
        let names: Vec<String> = rounds
            .in_order()
            .into_iter()
            .map(|(allocator, limits)| format!("{allocator} {limits}"))
            .collect();
        let of = |limits| {
            ["stock", "tessera", "tessera", "stock"].map(|name| format!("{name} {limits}"))
        };
        assert_eq!(names, [of("default"), of("5000")].concat());
    }

    #[test]
    fn allocators_have_equal_number_of_rounds() {
        for number in 1..=5 {
            let limits = vec![Limits::Default];
            let rounds = Rounds { rounds: number, limits, dialects: false, only: None };
            let stock = rounds
                .in_order()
                .iter()
                .filter(|(allocator, _)| *allocator == Allocator::Stock)
                .count();
            assert_eq!((rounds.in_order().len(), stock), (2 * number as usize, number as usize));
        }
    }

    #[test]
    fn refuses_workload_above_capacity() {
        let mut workload =
            Workload { pods: 32, nodes: 1, gpus: 8, memory: 20, cores: 25, rate: None };
        assert_eq!(workload.check(), Ok(()));
        workload.pods = 33;
        let error = workload.check().unwrap_err().to_string();
        assert!(error.contains("capacity for 32 pods") && error.contains("--pods 33"), "{error}");
        workload.cores = 0;
        workload.memory = 10;
        assert_eq!(workload.check(), Ok(()));
    }

    #[test]
    fn limit_is_a_number_or_default() {
        assert_eq!("default".parse(), Ok(Limits::Default));
        assert_eq!("50".parse(), Ok(Limits::PerSecond(50)));
        assert!("0".parse::<Limits>().is_err() && "fast".parse::<Limits>().is_err());
    }
}
