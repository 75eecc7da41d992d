//! A trace in the format of FGD's artefact (hkust-adsl/kubernetes-scheduler-simulator).
//!
//! ```text
//! DIR/openb_node_list_gpu_node.csv     sn, cpu_milli, memory_mib, gpu, model
//! DIR/openb_pod_list_<trace>.csv       name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec
//! DIR/sequences/<trace>.json           seed -> { order: indices of pods by name, node_rank: rank of each node by sn }
//! DIR/published/allo.csv               workload, sc_policy, tune, seed, total_gpus, allocated % at 0, 1, ... % of arrivals
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Thousandths of one GPU; 1000 is a whole GPU.
pub type GpuMilli = u32;

/// One whole GPU.
pub const WHOLE: GpuMilli = 1000;

/// A node of the trace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct NodeRow {
    /// Name.
    pub sn: String,
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Memory of the node (not of its GPUs), in MiB.
    pub memory_mib: u64,
    /// Number of GPUs.
    pub gpu: usize,
    /// Model of its GPUs; a node has one model.
    pub model: String,
}

/// A pod of the trace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PodRow {
    /// Name.
    pub name: String,
    /// CPU in thousandths of a core.
    pub cpu_milli: u64,
    /// Memory of the node, in MiB.
    pub memory_mib: u64,
    /// Number of GPUs.
    pub num_gpu: usize,
    /// Share of each GPU: 1000 is a whole GPU; less is a share, with `num_gpu` 1.
    pub gpu_milli: GpuMilli,
    /// Accepted models, `A|B`; empty: any.
    #[serde(default)]
    pub gpu_spec: String,
}

impl PodRow {
    /// Returns the accepted models; none: any.
    pub fn models(&self) -> impl Iterator<Item = &str> {
        self.gpu_spec.split('|').filter(|model| !model.is_empty())
    }

    /// Returns the total demand in thousandths of a GPU.
    #[must_use]
    pub fn total_gpu_milli(&self) -> u64 {
        self.num_gpu as u64 * u64::from(self.gpu_milli)
    }
}

/// Arrivals of one seed.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Sequence {
    /// Indexes into [`Trace::pods`], one per arrival.
    pub order: Vec<usize>,
    /// Rank of each of [`Trace::nodes`], which breaks ties.
    pub node_rank: Vec<usize>,
}

/// A workload on a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Name in file names.
    pub name: String,
    /// Nodes, sorted by name.
    pub nodes: Vec<NodeRow>,
    /// Pods, sorted by name.
    pub pods: Vec<PodRow>,
    /// Arrivals by seed.
    pub sequences: BTreeMap<u64, Sequence>,
}

impl Trace {
    /// Reads the trace `name` from `directory`.
    ///
    /// # Errors
    /// The error names the file and the line or seed that does not match the format.
    pub fn read(directory: &Path, name: &str) -> anyhow::Result<Self> {
        let mut nodes: Vec<NodeRow> = rows(&directory.join("openb_node_list_gpu_node.csv"))?;
        nodes.sort_by(|a, b| a.sn.cmp(&b.sn));
        let pod_list = directory.join(format!("openb_pod_list_{name}.csv"));
        let mut pods: Vec<PodRow> = rows(&pod_list)?;
        pods.sort_by(|a, b| a.name.cmp(&b.name));
        for pod in &pods {
            check(pod).with_context(|| format!("{}: pod {}", pod_list.display(), pod.name))?;
        }
        let sequences =
            sequences(&directory.join(format!("sequences/{name}.json")), nodes.len(), pods.len())?;
        Ok(Self { name: name.to_owned(), nodes, pods, sequences })
    }

    /// Returns the capacity of all GPUs in thousandths.
    #[must_use]
    pub fn capacity_milli(&self) -> u64 {
        self.nodes.iter().map(|node| node.gpu as u64 * u64::from(WHOLE)).sum()
    }
}

/// Published result of one workload, policy and seed.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// Published name of the policy, such as `06-FGD`.
    pub policy: String,
    /// Seed.
    pub seed: u64,
    /// Allocated percentage of the GPUs, by percentage of arrivals from 0.
    pub allocated: Vec<f64>,
}

/// Reads the published results for the trace `name`.
///
/// # Errors
/// The error names the file or row that does not match the format.
pub fn published(directory: &Path, name: &str) -> anyhow::Result<Vec<Published>> {
    let path = directory.join("published/allo.csv");
    let workload = format!("openb_pod_list_{name}");
    let all: Vec<(String, String, f64, u64, f64, Vec<f64>)> = rows(&path)?;
    let matching = all.into_iter().filter(|row| row.0 == workload);
    Ok(matching
        .map(|(_, policy, _, seed, _, allocated)| Published { policy, seed, allocated })
        .collect())
}

fn check(pod: &PodRow) -> anyhow::Result<()> {
    match (pod.num_gpu, pod.gpu_milli) {
        (0, 0) | (1, 1..=WHOLE) | (2.., WHOLE) => Ok(()),
        (0, milli) => bail!("gpu_milli {milli}: must be 0 with num_gpu 0"),
        (_, 0) => bail!("gpu_milli 0: must be 1 to 1000 with num_gpu above 0"),
        (_, milli) => {
            bail!("gpu_milli {milli}: must be at most 1000, and below 1000 only with num_gpu 1")
        }
    }
}

fn rows<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Vec<T>> {
    let rows = csv::Reader::from_reader(open(path)?).into_deserialize();
    rows.collect::<Result<_, _>>().with_context(|| path.display().to_string())
}

fn sequences(path: &Path, nodes: usize, pods: usize) -> anyhow::Result<BTreeMap<u64, Sequence>> {
    let sequences: BTreeMap<u64, Sequence> = serde_json::from_reader(BufReader::new(open(path)?))
        .with_context(|| path.display().to_string())?;
    for (seed, sequence) in &sequences {
        let place = || format!("{}: seed {seed}", path.display());
        let ranks = sequence.node_rank.len();
        ensure!(ranks == nodes, "{}: node_rank has {ranks} entries for {nodes} nodes", place());
        if let Some(pod) = sequence.order.iter().find(|&&pod| pod >= pods) {
            bail!("{}: order has pod {pod}, but there are {pods} pods", place());
        }
    }
    Ok(sequences)
}

fn open(path: &Path) -> anyhow::Result<File> {
    File::open(path).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: &str = "sn,cpu_milli,memory_mib,gpu,model\nb,8000,100,1,T4\na,96000,200,8,G2\n";
    const PODS: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n\
                        q,1000,10,1,460,T4|G2,LS\np,2000,20,8,1000,,BE\n";
    const ORDER: &str = r#"{"7": {"order": [1, 0, 1], "node_rank": [1, 0]}}"#;

    fn directory(pods: &str, order: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        std::fs::create_dir(directory.path().join("sequences")).unwrap();
        write("openb_node_list_gpu_node.csv", NODES);
        write("openb_pod_list_tiny.csv", pods);
        write("sequences/tiny.json", order);
        directory
    }

    #[test]
    fn trace_is_sorted_by_name() {
        let trace = Trace::read(directory(PODS, ORDER).path(), "tiny").unwrap();
        assert_eq!(trace.nodes.iter().map(|n| n.sn.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(trace.pods.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["p", "q"]);
        assert_eq!(trace.capacity_milli(), 9000);
        assert_eq!(trace.pods[1].models().collect::<Vec<_>>(), ["T4", "G2"]);
        assert_eq!(trace.pods[0].models().count(), 0);
        assert_eq!(trace.sequences[&7].order, [1, 0, 1]);
    }

    #[test]
    fn pods_without_gpu_spec_accept_any_model() {
        let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1,1,0,0\nq,1,1,1,1000\n";
        let trace = Trace::read(directory(pods, ORDER).path(), "tiny").unwrap();
        assert!(trace.pods.iter().all(|pod| pod.models().count() == 0));
    }

    #[test]
    fn format_errors_name_their_location() {
        let share_of_two = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1,1,2,500\nq,1,1,0,0\n";
        let error = |pods, order| {
            format!("{:#}", Trace::read(directory(pods, order).path(), "tiny").unwrap_err())
        };
        assert!(error(share_of_two, ORDER).contains("pod p: gpu_milli 500"));
        let unknown_pod = r#"{"7": {"order": [2], "node_rank": [1, 0]}}"#;
        assert!(error(PODS, unknown_pod).contains("seed 7: order has pod 2, but there are 2 pods"));
        let few_nodes = r#"{"7": {"order": [1], "node_rank": [1]}}"#;
        assert!(error(PODS, few_nodes).contains("seed 7: node_rank has 1 entries for 2 nodes"));
        assert!(error("name,cpu_milli\np,1\n", ORDER).contains("memory_mib"));
    }
}
