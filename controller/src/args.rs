//! The command line.

use std::path::PathBuf;

use clap::Parser;
use tessera_runtime::address::ListenAddress;
use tessera_runtime::log::LogFormat;

use crate::core::{NominationPolicy, PreemptionPolicy, RecoveryPolicy};
use crate::webhook::publish::CertificateSource;

/// Allocates GPU claims of the driver gpu.tessera.dev.
#[derive(Debug, Parser)]
#[command(name = "tessera-controller", version)]
pub struct Args {
    /// Path of a kubeconfig file. Default: the file that KUBECONFIG names, ~/.kube/config, or the
    /// service account of the pod.
    #[arg(long, env = "TESSERA_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the Lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = "tessera-system")]
    pub namespace: String,
    /// Identity in the Lease and in events. Default: host name and process ID.
    #[arg(long, env = "POD_NAME")]
    pub identity: Option<String>,
    /// Allocate claims only while holding the Lease. Disable only if exactly one process runs.
    #[arg(long, env = "TESSERA_LEADER_ELECT", default_value_t = true, action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// Seconds that a pod must be pending before a node can be reserved for it, so that other pods
    /// do not get the devices that become free (starvation avoidance); 0 = never.
    #[arg(long, env = "TESSERA_RESERVATION_DELAY_SECONDS", default_value_t = 300)]
    pub reservation_delay_seconds: u32,
    /// Write the node of an allocation to the pod's status.nominatedNodeName, so that
    /// kube-scheduler tries that node before all others.
    #[arg(long, env = "TESSERA_NOMINATE_NODES", value_enum, default_value_t = NominationPolicy::Auto)]
    pub nominate_nodes: NominationPolicy,
    /// Evict pods of a strictly lower priority so that a pod gets its devices: if it fits on no
    /// node, or never.
    #[arg(long, env = "TESSERA_PREEMPTION", value_enum, default_value_t = PreemptionPolicy::LowerPriority)]
    pub preemption: PreemptionPolicy,
    /// Evict pods whose GPU is not fit for use any more, so that their owners create them again
    /// elsewhere: never; if the driver reports the GPU as unhealthy; always, also if the GPU is not
    /// published any more or is overcommitted.
    #[arg(long, env = "TESSERA_RECOVERY", value_enum, default_value_t = RecoveryPolicy::Never)]
    pub recovery: RecoveryPolicy,
    /// Seconds for which a GPU is not fit for use before its pods are evicted.
    #[arg(
        long,
        env = "TESSERA_RECOVERY_DELAY_SECONDS",
        value_name = "SECONDS",
        default_value_t = 300
    )]
    pub recovery_delay_seconds: u32,
    /// File with the groups of nodes for which a cluster autoscaler is asked by placeholder pods
    /// while pods fit on no node. For autoscalers that find no node for claims: with the fence in
    /// the ResourceSlices [default: none, no placeholder pods].
    #[arg(long, env = "TESSERA_NODE_GROUPS", value_name = "PATH")]
    pub node_groups: Option<PathBuf>,
    /// Ask the drivers for the load of their GPUs every 30 seconds, by which LeastLoaded places
    /// pods. Without it, that policy ranks GPUs by what is allocated.
    #[arg(long, env = "TESSERA_SAMPLE_LOAD", default_value_t = true, action = clap::ArgAction::Set)]
    pub sample_load: bool,
    /// Address of /metrics and /healthz; empty disables both.
    #[arg(long, env = "TESSERA_METRICS_ADDRESS", default_value = "0.0.0.0:9401")]
    pub metrics_address: ListenAddress,
    /// Socket that the command `healthz` queries. Other pods cannot reach it, so their requests to
    /// --metrics-address do not fail the probes of the kubelet [default: not served].
    #[arg(long, env = "TESSERA_HEALTH_SOCKET", value_name = "PATH", global = true)]
    pub health_socket: Option<PathBuf>,
    /// Socket that the command `readyz` queries [default: not served].
    #[arg(long, env = "TESSERA_READY_SOCKET", value_name = "PATH", global = true)]
    pub ready_socket: Option<PathBuf>,
    /// Settings file of the dialects, by which the admission webhook converts pods of other
    /// GPU-sharing systems [default: none].
    #[arg(long, env = "TESSERA_DIALECTS", value_name = "PATH")]
    pub dialects: Option<PathBuf>,
    /// Address of the admission webhook, which every replica serves; empty disables it.
    #[arg(long, env = "TESSERA_WEBHOOK_ADDRESS", default_value = "")]
    pub webhook_address: ListenAddress,
    /// Writer of the webhook's certificate and of its caBundle: the controller, or another program.
    #[arg(long, env = "TESSERA_WEBHOOK_CERTIFICATE", value_enum, default_value_t = CertificateSource::SelfManaged)]
    pub webhook_certificate: CertificateSource,
    /// File with the DeviceTaintRules that keep kube-scheduler from the GPUs, as a YAML list. The
    /// controller restores one that is changed or deleted [default: none, the taint is in the
    /// ResourceSlices].
    #[arg(long, env = "TESSERA_FENCE_RULES", value_name = "PATH")]
    pub fence_rules: Option<PathBuf>,
    /// Format of log lines. RUST_LOG sets the log level.
    #[arg(long, env = "TESSERA_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Something else than running the controller.
    #[command(subcommand)]
    pub command: Option<ControllerCommand>,
}

/// A command besides running the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum ControllerCommand {
    /// Ask the running controller at --health-socket, and exit with 1 if it is not healthy.
    Healthz,
    /// Ask the running controller at --ready-socket, and exit with 1 if it does not serve the
    /// admission webhook yet.
    Readyz,
}

impl Args {
    /// Parses the command line and runs until a signal stops the process.
    ///
    /// # Errors
    /// The API server cannot be reached at all, an address cannot be bound, leadership is lost, or
    /// the controller that `healthz` or `readyz` asks is not healthy or ready.
    pub async fn parse_and_run() -> anyhow::Result<()> {
        crate::run::run(Self::parse()).await
    }
}
