//! The command line.

mod defragment;
mod maintenance;
mod resize;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tessera_allocator::{PlanSettings, Policy};
use tessera_dialect::Dialect;

pub use self::defragment::{DefragArgs, DefragPodArgs, DefragRequest, DefragRequestsArgs};
pub use self::maintenance::{
    CordonArgs, CordonGpuArgs, CordonedDevice, DrainArgs, DrainGpuArgs, DrainedDevice,
};
pub use self::resize::ResizeArgs;
use crate::cluster::ClusterTarget;
use crate::convert::TemplatePath;
use crate::output::OutputFormat;

/// Inspect GPU sharing: usage per node, pending pods, placement simulation, and conversion of
/// manifests of other systems. Change shares in use, and take GPUs out of service.
///
/// Only resize, cordon, uncordon, drain and `defrag --apply` change the cluster.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-tessera",
    bin_name = "kubectl tessera",
    version,
    after_help = "\
Examples:
  kubectl tessera tree                           GPUs of all nodes and the pods that use them
  kubectl tessera explain pod trainer -n team-a  why the pod is pending, or its allocated GPUs
  kubectl tessera simulate -f pods.yaml          nodes and GPUs that these pods would get
  kubectl tessera convert -f app.yaml --dialect hami
                                                 the same pods with claims
  kubectl tessera drain gpu node-a/0             move the pods of a GPU elsewhere
  kubectl tessera snapshot -o cluster.json.gz    save the cluster's state to work on it elsewhere

Exit codes:
  0  success
  1  error, also in the command line
  2  the pod or claim is pending (explain), a pod does not fit (simulate), or a pod cannot be \
converted (convert)"
)]
pub struct PluginArgs {
    /// The command to run.
    #[command(subcommand)]
    pub command: PluginCommand,
    /// Options of the connection to the cluster.
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// Options of the connection to the cluster.
#[derive(Debug, Clone, Default, Args)]
pub struct ConnectionArgs {
    /// Kubeconfig file [default: $KUBECONFIG or ~/.kube/config]
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: the current context]
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Namespace [default: the namespace of the context; all namespaces for `tree`]
    #[arg(short, long, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
}

impl ConnectionArgs {
    /// Returns the cluster to connect to.
    pub fn target(&self) -> ClusterTarget {
        ClusterTarget { kubeconfig: self.kubeconfig.clone(), context: self.context.clone() }
    }
}

/// A command of the plugin.
#[derive(Debug, Subcommand)]
pub enum PluginCommand {
    /// Show nodes, their GPUs, and the pods that use each GPU
    #[command(after_help = "\
Examples:
  kubectl tessera tree
  kubectl tessera tree node-a node-b         only these nodes
  kubectl tessera tree --claims -n team-a    one line for each allocation of a namespace
  kubectl tessera tree --usage               with the actual use of each allocation
  kubectl tessera tree -o json | jq '.nodes[].gpus[] | select(.shares == []) | .device'

Memory and compute are allocated/total: memory in GiB, compute in percent of one GPU, as stored in the claims. With --usage \
those of an allocation are used/allocated: memory that its processes hold, and their GPU time, \
averaged over 2 s. It is read from the metrics of each node's driver, and needs the permission \
`get` on pods/proxy in the namespace of the driver (Role tessera-usage-viewer of the Helm chart).

STATE:
  free             nothing is allocated
  shared           allocated in part
  full             shared, without free memory
  exclusive        allocated to one claim
  Unhealthy        the GPU failed and is tainted; the reason follows
  Cordoned         an operator keeps new claims off it
  NotManaged       not fenced: kube-scheduler allocates the GPU
  NotPublished     allocated, but no longer in a ResourceSlice
  Oversubscribed   publishes more memory than the GPU has; the rest is host memory
  Overcommitted    more is allocated than the GPU publishes
  MPS              shared by an MPS control daemon
  ClaimDeleted     the claim was deleted while a pod uses it")]
    Tree(TreeArgs),
    /// Explain why a pod or claim is pending, or show its allocated GPUs
    #[command(
        override_usage = "kubectl tessera explain [OPTIONS] pod NAME | claim NAME | POD/ENTRY",
        after_help = "\
Examples:
  kubectl tessera explain pod trainer -n team-a
  kubectl tessera explain claim trainer-gpu-x7k2p -n team-a
  kubectl tessera explain trainer/gpu -n team-a    the claim of entry `gpu` of pod `trainer`
  kubectl tessera explain pod trainer --snapshot cluster.json.gz

The command plans all pending pods as the controller does, over the same objects, so its reasons \
are those of the pod's events, in full. Nodes that the controller skips for a while because the \
pod failed there are known to the controller only; the pod's events name them.

States of a pod:
  NoClaims           uses no ResourceClaims
  NotManaged         uses claims of other drivers only
  MissingClaim       a claim does not exist yet, is being deleted, or belongs to another owner
  Blocked            cannot be planned before a user changes something
  SchedulingGated    has a scheduling gate
  Pending            no node has the devices
  Schedulable        fits; the controller has not allocated its claims yet
  PendingScheduling  its claims are allocated; kube-scheduler has not bound it yet
  Bound              bound, and its claims are allocated on its node
  NodeMismatch       bound, and a claim is not allocated on its node
  Terminating, Completed

Exit code 2: the pod or claim is pending."
    )]
    Explain(ExplainArgs),
    /// Find what is wrong: controller, GPUs, pods that are not served, GPUs without a claim
    #[command(after_help = "\
Examples:
  kubectl tessera doctor
  kubectl tessera doctor --snapshot cluster.json.gz
  kubectl tessera doctor -o json | jq '.problems[] | select(.severity == \"Error\")'

Checks: the controller runs and GPUs are published; states of GPUs and nodes; claims deleted in \
use; pods that wait for an extended resource which Tessera is not asked to serve; DeviceClasses \
with an extended resource in mode managed; processes that use GPUs without a claim (by the \
driver's events of the last hour); quotas, defaults and classes that cannot be read; pending pods.

Exit code 2: there are errors or warnings.")]
    Doctor(DoctorArgs),
    /// Simulate the placement of pods from manifests (dry run)
    #[command(after_help = "\
Examples:
  kubectl tessera simulate -f pods.yaml
  helm template my-chart | kubectl tessera simulate -f -
  kubectl tessera simulate -f pods.yaml --snapshot cluster.json.gz --policy spread
  kubectl tessera simulate -f pods.yaml --preempt    pods to evict for those that do not fit

Files contain Pods, Deployments, StatefulSets, ReplicaSets and Jobs with their ResourceClaims and \
ResourceClaimTemplates. They may also contain DeviceClasses, Nodes, ResourceSlices, \
DeviceTaintRules, GpuQuotas, GpuDefaults and PodGroups, to try what is not there yet. Other kinds \
are skipped with a note. Templates may also be in the cluster.

Pending pods of the cluster are planned too, before pods of the files with the same priority.

The policy least-fragmentation uses the requests that the controller has seen. They are in the \
controller's memory only: the simulation starts with the default mix, so it may choose another \
feasible node.

With --preempt each pod that does not fit is examined as if it were the only one. Pods are evicted \
as a whole, of one node and of strictly lower priority; of several ways the one with the lowest \
priority, the fewest pods, and the least memory. PodDisruptionBudgets are not looked at.

Not simulated: ResourceQuotas, LimitRanges, admission, and plugins of kube-scheduler other \
than readiness, cordons, taints, node selectors, required node affinity and resources.

Exit code 2: a pod does not fit.")]
    Simulate(SimulateArgs),
    /// Show what the claims of namespaces hold of their GpuQuotas, and which pods wait for one
    #[command(after_help = "\
Examples:
  kubectl tessera quota -n team-a
  kubectl tessera quota -A
  kubectl tessera quota -A -o json | jq '.quotas[] | select(.waitingPods != [])'

A claim counts from the decision to allocate it until no container can use its devices any more. \
The amounts are computed from the claims, as the controller does; the status of a GpuQuota follows \
within about a second.

RESOURCE:
  memory   device memory
  cores    percent of a GPU
  shares   shares of GPUs
  gpus     GPUs of which a claim takes all the memory")]
    Quota(QuotaArgs),
    /// Convert manifests of other GPU-sharing systems into manifests with claims
    #[command(after_help = "\
Examples:
  kubectl tessera convert -f app.yaml --dialect hami > converted.yaml
  kubectl tessera convert -f manifests/ -R --dialect volcano --check
  kustomize build . | kubectl tessera convert -f - --dialect nvidia --settings settings.yaml
  kubectl tessera convert -f app.yaml --dialect hami | kubectl tessera simulate -f -

The manifests go to the standard output with their comments and order, each ResourceClaimTemplate \
before the object that uses it; the report goes to the standard error output. The claims are those \
that the admission webhook of Tessera gives to such pods. If an object is refused, no manifests are \
printed. Nothing is read from a cluster, and nothing is changed.

Kinds with pod templates: Pod, PodTemplate, Deployment, StatefulSet, DaemonSet, ReplicaSet, \
ReplicationController, Job, CronJob, Volcano's Job, PyTorchJob, TFJob, MPIJob, XGBoostJob, \
PaddleJob, JAXJob, RayCluster, RayJob, RayService, LeaderWorkerSet, JobSet, Rollout. For others, \
--pod-template-path names the place.

A Namespace among the manifests with the label gpu.tessera.dev/dialect selects the dialect of its \
objects.

Settings file, with the defaults of HAMi's dialect:
  deviceClass: gpu.tessera.dev
  default: [hami]
  dialects:
    hami: {memoryFactor: 1, defaultGpus: 1, computePolicy: Balance, privileged: Refuse}

Exit code 2: an object is refused.")]
    Convert(ConvertArgs),
    /// Change the size of a share while containers use it
    #[command(after_help = "\
Examples:
  kubectl tessera resize pod/trainer --memory 30Gi -n team-a
  kubectl tessera resize trainer-gpu-x7k2p --memory 30Gi --cores 50
  kubectl tessera resize trainer --request small --cores 10 --timeout 10m

The controller grants the size if the GPU and the quotas of the namespace have room, the driver of \
the node changes the limits of the containers at once, and nothing restarts. Programs that read \
their limit once, at their start, need a restart to use more. A smaller memory limit is applied once \
the containers use no more than that.

The size is in the GpuResize with the name of the claim, and lasts as long as the claim. What is \
refused, or not applied in time, is withdrawn. It takes the permissions of the ClusterRole edit.")]
    Resize(ResizeArgs),
    /// Keep new claims off a GPU; pods that use it stay
    #[command(after_help = "\
Examples:
  kubectl tessera cordon gpu node-a/0              by the index of `kubectl tessera tree`
  kubectl tessera cordon gpu node-a/GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77

The command creates a DeviceTaintRule with the taint gpu.tessera.dev/cordoned:NoSchedule, which the \
controller honours. Claims that tolerate it are still allocated there. It needs Kubernetes 1.37 or \
newer, and the permissions of the ClusterRole tessera-operator of the Helm chart.")]
    Cordon(CordonArgs),
    /// Allow new claims on a GPU again
    #[command(after_help = "\
Examples:
  kubectl tessera uncordon gpu node-a/0 node-a/1

Other taints of the GPU stay; the command names them.")]
    Uncordon(CordonArgs),
    /// Cordon a GPU and evict the pods that use it
    #[command(after_help = "\
Examples:
  kubectl tessera drain gpu node-a/0
  kubectl tessera drain gpu node-a/0 --dry-run           pods that would be evicted
  kubectl tessera drain gpu node-a/0 --timeout 10m --grace-period 60

Pods are evicted as by `kubectl drain`: PodDisruptionBudgets hold, and a refused eviction is tried \
again every second. The command ends when no claim is allocated on the GPU. Interrupted or after \
its timeout it can be repeated; the GPU stays cordoned until `kubectl tessera uncordon gpu`.

Pods that no controller creates again are refused before anything is changed, unless --force is \
given. Pods of a DaemonSet are created again on the same node, and wait for another GPU there.")]
    Drain(DrainArgs),
    /// Name the pods to move so that a pending pod fits, and move them on request
    #[command(after_help = "\
Examples:
  kubectl tessera defrag pod trainer -n team-a
  kubectl tessera defrag pod trainer -n team-a --snapshot cluster.json.gz
  kubectl tessera defrag pod trainer -n team-a --apply --timeout 10m
  kubectl tessera defrag requests --top 10       does one more pod like these fit?

Free capacity in pieces serves no pod that needs a whole GPU. The command searches the node with the \
least loss from which pods of any priority can be moved so that the pod fits and each of them fits \
elsewhere. The controller places them when their owners create them again, maybe elsewhere than the \
column TO says.

With --apply the GPUs are cordoned, the pods are evicted, and the GPUs are uncordoned once the pods \
have ended; then the pod gets its devices, unless others come before it. PodDisruptionBudgets hold, \
and none is evicted if one eviction would be refused. Pods that no controller creates again are \
refused, unless --force is given. It needs what `drain` needs. Interrupted, it leaves the GPUs \
cordoned.")]
    Defrag(DefragArgs),
    /// Save the cluster's state for explain, simulate and tree
    #[command(after_help = "\
Examples:
  kubectl tessera snapshot -o cluster.json.gz
  kubectl tessera snapshot | jq '.pods[].metadata.name'
  kubectl tessera tree --snapshot cluster.json.gz

The file contains ResourceSlices of gpu.tessera.dev, DeviceTaintRules, DeviceClasses, \
ResourceClaims and their templates, nodes, pods and the controller's Lease, each reduced to the \
fields that planning reads.

Possibly confidential content: names of namespaces, pods, claims and nodes; labels and taints of \
nodes; UUIDs and PCI addresses of GPUs; CEL selectors; GpuConfigs.

Not in the file: images, commands, environment, volumes and annotations of pods; addresses of \
nodes; Secrets; ConfigMaps; configurations for other drivers.")]
    Snapshot(SnapshotArgs),
}

/// Output options of a table.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct OutputArgs {
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: OutputFormat,
    /// Omit headers and totals
    #[arg(long)]
    pub no_headers: bool,
}

/// The source of the objects.
#[derive(Debug, Clone, Default, Args)]
pub struct SourceArgs {
    /// Read a saved snapshot instead of a cluster
    #[arg(long, value_name = "FILE")]
    pub snapshot: Option<PathBuf>,
}

/// Arguments of `tree`.
#[derive(Debug, Args)]
pub struct TreeArgs {
    /// Nodes to show [default: all nodes with GPUs]
    #[arg(value_name = "NODE")]
    pub nodes: Vec<String>,
    /// Print one line for each allocation
    #[arg(long)]
    pub claims: bool,
    /// Show the actual use of each allocation, read from the drivers of the nodes
    #[arg(long, conflicts_with = "snapshot")]
    pub usage: bool,
    /// The source of the objects.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Output options.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The source of the objects.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: OutputFormat,
}

/// Arguments of `quota`.
#[derive(Debug, Args)]
pub struct QuotaArgs {
    /// Show the quotas of all namespaces
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub all_namespaces: bool,
    /// The source of the objects.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Output options.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// `pod NAME`, `claim NAME`, or `POD/ENTRY` for the claim of an entry of the pod's
    /// spec.resourceClaims
    #[arg(value_name = "SUBJECT", num_args = 1..=2, required = true)]
    pub subject: Vec<String>,
    /// The source of the objects.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: OutputFormat,
}

/// The object to explain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExplainSubject {
    /// The pod of that name.
    Pod(String),
    /// The ResourceClaim of that name.
    Claim(String),
    /// The ResourceClaim of an entry of a pod's `spec.resourceClaims`.
    PodClaim {
        /// The pod.
        pod: String,
        /// The entry.
        entry: String,
    },
}

/// Error returned when the arguments of `explain` name no object.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot explain `{0}`: expected `pod NAME`, `claim NAME` or `POD/ENTRY`; see `kubectl tessera \
     explain --help`"
)]
pub struct SubjectError(String);

impl ExplainSubject {
    /// Parses `pod NAME`, `pod/NAME`, `claim NAME`, `claim/NAME` and `[claim] POD/ENTRY`.
    ///
    /// # Errors
    /// The arguments have none of these forms.
    pub fn parse(arguments: &[String]) -> Result<Self, SubjectError> {
        let failed = || SubjectError(arguments.join(" "));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (kind, name) = match arguments.as_slice() {
            [kind, name] => (*kind, *name),
            [name] => name.split_once('/').filter(|(kind, _)| is_kind(kind)).unwrap_or(("", name)),
            _ => return Err(failed()),
        };
        match (kind, name.split_once('/')) {
            (kind, None) if is_pod(kind) => Ok(Self::Pod(name.to_owned())),
            (kind, None) if is_claim(kind) => Ok(Self::Claim(name.to_owned())),
            (kind, Some((pod, entry))) if kind.is_empty() || is_claim(kind) => {
                Ok(Self::PodClaim { pod: pod.to_owned(), entry: entry.to_owned() })
            }
            _ => Err(failed()),
        }
    }
}

fn is_kind(word: &str) -> bool {
    is_pod(word) || is_claim(word)
}

fn is_pod(word: &str) -> bool {
    matches!(word, "pod" | "pods" | "po")
}

fn is_claim(word: &str) -> bool {
    matches!(word, "claim" | "claims" | "resourceclaim" | "resourceclaims")
}

/// Arguments of `simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// Files with YAML or JSON documents; `-` reads the standard input
    #[arg(short = 'f', long = "filename", required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Placement policy of pods whose GpuConfig names none [default: the controller's default]
    #[arg(long, value_enum)]
    pub policy: Option<PolicyName>,
    /// Seed of `--policy random`; equal seeds give equal results
    #[arg(long, default_value_t, value_name = "NUMBER")]
    pub seed: u64,
    /// Name the pods of lower priority to evict so that a pod fits; nothing is evicted
    #[arg(long)]
    pub preempt: bool,
    /// The source of the objects.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Output options.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Files or directories with YAML or JSON documents; `-` reads the standard input
    #[arg(short = 'f', long = "filename", required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Read subdirectories too
    #[arg(short = 'R', long)]
    pub recursive: bool,
    /// System that the manifests are written for; may be repeated [default: `default` of
    /// --settings]
    #[arg(long, value_name = "NAME", value_parser = dialect, required_unless_present = "settings")]
    pub dialect: Vec<Dialect>,
    /// Settings of the dialects, as in the chart's value `dialects` [default: those of each system]
    #[arg(long, value_name = "FILE")]
    pub settings: Option<PathBuf>,
    /// Place of pod templates in objects of other kinds, with `*` for all entries of a list or
    /// mapping; may be repeated
    #[arg(long, value_name = "PATH")]
    pub pod_template_path: Vec<TemplatePath>,
    /// Add tolerations for taints that are named as the resources, as kube-apiserver does with the
    /// admission plugin ExtendedResourceToleration
    #[arg(long)]
    pub add_tolerations: bool,
    /// Print the report instead of the manifests
    #[arg(long)]
    pub check: bool,
    /// Format of the report
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT", requires = "check")]
    pub output: OutputFormat,
}

fn dialect(text: &str) -> Result<Dialect, String> {
    Dialect::named(text).ok_or_else(|| {
        let names: Vec<_> = Dialect::ALL.into_iter().map(Dialect::name).collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// Arguments of `snapshot`.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// File to write, compressed if its name ends in .gz [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Name of a placement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    /// First feasible node and device (kube-scheduler's order)
    FirstFit,
    /// Fullest node and device
    Binpack,
    /// Emptiest node and device
    Spread,
    /// Random node and device
    Random,
    /// Minimizes capacity stranded for expected requests (default)
    LeastFragmentation,
}

impl PolicyName {
    /// Returns the controller's default settings with this policy.
    pub fn settings(chosen: Option<Self>) -> PlanSettings {
        let policy = match chosen {
            None => return PlanSettings::default(),
            Some(Self::FirstFit) => Policy::FirstFit,
            Some(Self::Binpack) => Policy::Binpack,
            Some(Self::Spread) => Policy::Spread,
            Some(Self::Random) => Policy::Random,
            Some(Self::LeastFragmentation) => Policy::LeastFragmentation,
        };
        PlanSettings { policy, ..PlanSettings::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<ExplainSubject, SubjectError> {
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        ExplainSubject::parse(&arguments)
    }

    #[test]
    fn parses_pods_claims_and_entries_of_pods() {
        let pod = || Ok(ExplainSubject::Pod("p".to_owned()));
        let claim = || Ok(ExplainSubject::Claim("c".to_owned()));
        let entry =
            || Ok(ExplainSubject::PodClaim { pod: "p".to_owned(), entry: "gpu".to_owned() });
        assert_eq!(
            [parse(&["pod", "p"]), parse(&["pod/p"]), parse(&["po", "p"])],
            [(); 3].map(|()| pod())
        );
        assert_eq!([parse(&["claim", "c"]), parse(&["resourceclaims/c"])], [claim(), claim()]);
        assert_eq!(
            [parse(&["p/gpu"]), parse(&["claim", "p/gpu"]), parse(&["claim/p/gpu"])],
            [(); 3].map(|()| entry())
        );
    }

    #[test]
    fn refuses_other_kinds_and_bare_names() {
        assert!(parse(&["node", "x"]).is_err());
        assert!(parse(&["trainer"]).is_err());
        assert!(parse(&["pod", "p/gpu"]).is_err());
    }
}
