//! The command line.

use std::path::PathBuf;

use clap::Parser;
use tessera_runtime::address::Address;
use tessera_runtime::log::LogFormat;

/// Allocates GPU claims of the driver gpu.tessera.dev.
#[derive(Debug, Parser)]
#[command(name = "tessera-controller", version)]
pub struct Args {
    /// How to reach the API server; without it the file that KUBECONFIG names or ~/.kube/config,
    /// then the pod's service account.
    #[arg(long, env = "TESSERA_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the Lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = "tessera-system")]
    pub namespace: String,
    /// Who we are in the Lease and in events; without it the host name and process id.
    #[arg(long, env = "POD_NAME")]
    pub identity: Option<String>,
    /// Whether to work only while holding the Lease. Off only where there is one process for
    /// certain.
    #[arg(long, env = "TESSERA_LEADER_ELECT", default_value_t = true, action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// Seconds that a pod has to wait before a node is kept free for it, by turns, where others
    /// take what becomes free; 0 = never.
    #[arg(long, env = "TESSERA_PATIENCE_SECONDS", default_value_t = 300)]
    pub patience_seconds: u32,
    /// Where /metrics and /healthz are served; empty = nowhere.
    #[arg(long, env = "TESSERA_METRICS_ADDRESS", default_value = "0.0.0.0:9401")]
    pub metrics_address: Address,
    /// How log lines are written. What is logged is set by RUST_LOG.
    #[arg(long, env = "TESSERA_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

impl Args {
    /// Reads the command line and works until the process is told to stop.
    ///
    /// # Errors
    /// The API server cannot be reached at all, an address cannot be bound, or leadership is lost.
    pub async fn parse_and_run() -> anyhow::Result<()> {
        crate::run::run(Self::parse()).await
    }
}
