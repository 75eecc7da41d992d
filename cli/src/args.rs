//! The command line.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use tessera_allocator::{Policy, Settings};

use crate::cluster::Target;
use crate::output::Format;

/// Looks at GPUs that Tessera shares: who holds them, why a pod waits, what would be placed where.
///
/// Nothing that this program does changes a cluster.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-tessera",
    bin_name = "kubectl tessera",
    version,
    after_help = "\
Examples:
  kubectl tessera tree                           all GPUs and who holds how much of each
  kubectl tessera explain pod trainer -n team-a  why that pod waits, or where its devices are
  kubectl tessera simulate -f pods.yaml          where these pods would be placed
  kubectl tessera snapshot -o cluster.json.gz    what planning needs of this cluster, to work on it elsewhere

Exit codes:
  0  all is well: shown, saved, in place, everything fits
  1  an error, of the command line too
  2  the pod or claim has to wait (explain), or a pod does not fit (simulate)"
)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// How to reach the cluster.
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// Which cluster, and as whom.
#[derive(Debug, Clone, Default, ClapArgs)]
pub struct ConnectionArgs {
    /// Kubeconfig file; without it what $KUBECONFIG names, or ~/.kube/config.
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; without it the current one.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace; without it that of the context. `tree` shows all namespaces unless one is given.
    #[arg(short, long, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
}

impl ConnectionArgs {
    /// The cluster that is meant.
    pub fn target(&self) -> Target {
        Target { kubeconfig: self.kubeconfig.clone(), context: self.context.clone() }
    }
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show nodes, their GPUs, and who holds how much of each.
    #[command(after_help = "\
Examples:
  kubectl tessera tree
  kubectl tessera tree node-a node-b             these nodes only
  kubectl tessera tree --claims -n team-a        one line for each share of a namespace
  kubectl tessera tree -o json | jq '.nodes[].gpus[] | select(.shares == []) | .device'

A GPU's STATE has its taints, and Unhealthy, NotManaged (no fence: kube-scheduler allocates it), NotPublished (held, but in no
ResourceSlice any more), Oversubscribed (of the memory that is shown a part is the host's) or Overcommitted. A share's STATE has Whole (the GPU is its alone), ClaimGone (deleted under its pod) or MPS (shared by it).")]
    Tree(TreeArgs),
    /// Say why a pod or claim waits, or where its devices are.
    #[command(after_help = "\
Examples:
  kubectl tessera explain pod trainer -n team-a
  kubectl tessera explain claim trainer-gpu -n team-a
  kubectl tessera explain pod trainer --snapshot cluster.json.gz

It plans all waiting pods as the controller would, over the same objects, so its reasons are those of the pod's events, in full.
Nodes that the controller leaves out for a while because the pod could not run there are in its memory only: the pod's events
name them. Exit code 2: it has to wait.

States of pods: NoClaims, Foreign (other drivers only), Incomplete (a claim is not there), Blocked (somebody has to change something),
Gated, Waiting (nothing fits), Placeable (the controller's turn), ForScheduler (kube-scheduler's turn), Bound, Misplaced (bound elsewhere
than its claim), Deleting, Ended.")]
    Explain(ExplainArgs),
    /// Say where pods would be placed, without making them.
    #[command(after_help = "\
Examples:
  kubectl tessera simulate -f pods.yaml
  helm template my-chart | kubectl tessera simulate -f -
  kubectl tessera simulate -f pods.yaml --snapshot cluster.json.gz --policy spread

Files hold Pods, Deployments, StatefulSets, ReplicaSets and Jobs, with their ResourceClaims and ResourceClaimTemplates; also
DeviceClasses, Nodes, ResourceSlices and DeviceTaintRules, to try what is not there yet. Other kinds are left out, with a note.
Templates may also be in the cluster. Pods that wait in the cluster are planned too, first if they are of the same priority.
LeastFragmentation goes by the requests that the controller has seen, which are in its memory only: here it begins with what is
usual, so another node of those that fit may come out.

What it does not look at: rules of kube-scheduler but readiness, cordons, taints, node selectors, required node affinity and
resources; preemption; quotas, LimitRanges and other admission. Exit code 2: a pod does not fit.")]
    Simulate(SimulateArgs),
    /// Save what planning needs of the cluster, for explain and simulate.
    #[command(after_help = "\
Examples:
  kubectl tessera snapshot -o cluster.json.gz
  kubectl tessera snapshot | jq .pods[].metadata.name

The file holds ResourceSlices of gpu.tessera.dev, DeviceTaintRules, DeviceClasses, ResourceClaims and their templates, nodes, pods
and the controller's Lease, each without what planning does not look at.

In it, and maybe not for everybody: names of namespaces, pods, claims and nodes, labels and taints of nodes, UUIDs and PCI addresses of
GPUs, CEL selectors, GpuConfigs. Not in it: images, commands, environment, volumes and annotations of pods, addresses of nodes, Secrets,
ConfigMaps, configurations for other drivers.")]
    Snapshot(SnapshotArgs),
}

/// How results are written.
#[derive(Debug, Clone, Copy, Default, ClapArgs)]
pub struct OutputArgs {
    /// How the result is written.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: Format,
    /// Leave out headers, and the sum at the end.
    #[arg(long)]
    pub no_headers: bool,
}

/// Where objects come from.
#[derive(Debug, Clone, Default, ClapArgs)]
pub struct SourceArgs {
    /// Look at a saved snapshot, not at a cluster.
    #[arg(long, value_name = "FILE")]
    pub snapshot: Option<PathBuf>,
}

/// `tree`.
#[derive(Debug, ClapArgs)]
pub struct TreeArgs {
    /// Nodes to show; without any, all that have GPUs.
    #[arg(value_name = "NODE")]
    pub nodes: Vec<String>,
    /// One line for each share.
    #[arg(long)]
    pub claims: bool,
    /// Where objects come from.
    #[command(flatten)]
    pub source: SourceArgs,
    /// How results are written.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `explain`.
#[derive(Debug, ClapArgs)]
pub struct ExplainArgs {
    /// What NAME is.
    #[arg(value_enum, value_name = "pod|claim")]
    pub kind: Kind,
    /// Name of the Pod or ResourceClaim.
    pub name: String,
    /// Where objects come from.
    #[command(flatten)]
    pub source: SourceArgs,
    /// How the result is written.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: Format,
}

/// What can be explained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// A Pod.
    #[value(alias = "pods", alias = "po")]
    Pod,
    /// A ResourceClaim.
    #[value(alias = "claims", alias = "resourceclaim", alias = "resourceclaims")]
    Claim,
}

/// `simulate`.
#[derive(Debug, ClapArgs)]
pub struct SimulateArgs {
    /// Files of YAML or JSON documents; `-` is the standard input.
    #[arg(short = 'f', long = "filename", required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Placement policy of pods whose configuration names none; without it the controller's own.
    #[arg(long, value_enum)]
    pub policy: Option<PolicyName>,
    /// What `--policy random` draws its lots from; the same number gives the same result.
    #[arg(long, default_value_t, value_name = "NUMBER")]
    pub seed: u64,
    /// Where objects come from.
    #[command(flatten)]
    pub source: SourceArgs,
    /// How results are written.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `snapshot`.
#[derive(Debug, ClapArgs)]
pub struct SnapshotArgs {
    /// The file; compressed if its name ends in .gz. Without it the standard output, not
    /// compressed.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// A placement policy by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    /// The first node and device that fit, as kube-scheduler.
    FirstFit,
    /// The fullest first.
    Binpack,
    /// The emptiest first.
    Spread,
    /// Any, by lot.
    Random,
    /// Where the least becomes useless to the requests that are expected: the default.
    LeastFragmentation,
}

impl PolicyName {
    /// The controller's settings but for this policy.
    pub fn settings(chosen: Option<Self>) -> Settings {
        let policy = match chosen {
            None => return Settings::default(),
            Some(Self::FirstFit) => Policy::FirstFit,
            Some(Self::Binpack) => Policy::Binpack,
            Some(Self::Spread) => Policy::Spread,
            Some(Self::Random) => Policy::Random,
            Some(Self::LeastFragmentation) => Policy::LeastFragmentation,
        };
        Settings { policy, ..Settings::default() }
    }
}
