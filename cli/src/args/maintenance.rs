//! Arguments of `cordon`, `uncordon` and `drain`.

use std::time::Duration;

use clap::{Args, Subcommand};
use k8s_openapi::jiff::SignedDuration;

use crate::maintenance::GpuName;
use crate::output::OutputFormat;

/// Arguments of `cordon` and `uncordon`.
#[derive(Debug, Args)]
pub struct CordonArgs {
    /// The device.
    #[command(subcommand)]
    pub device: CordonedDevice,
}

/// A kind of device to cordon.
#[derive(Debug, Subcommand)]
pub enum CordonedDevice {
    /// GPUs, each as NODE/GPU with its index, device name or UUID
    Gpu(CordonGpuArgs),
}

/// Arguments of `cordon gpu` and `uncordon gpu`.
#[derive(Debug, Args)]
pub struct CordonGpuArgs {
    /// GPUs, each by its index, device name or UUID
    #[arg(value_name = "NODE/GPU", required = true)]
    pub gpus: Vec<GpuName>,
    /// Have the API server check the requests, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: OutputFormat,
}

/// Arguments of `drain`.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// The device.
    #[command(subcommand)]
    pub device: DrainedDevice,
}

/// A kind of device to drain.
#[derive(Debug, Subcommand)]
pub enum DrainedDevice {
    /// GPUs, each as NODE/GPU with its index, device name or UUID
    Gpu(DrainGpuArgs),
}

/// Arguments of `drain gpu`.
#[derive(Debug, Args)]
pub struct DrainGpuArgs {
    /// The GPUs and the output.
    #[command(flatten)]
    pub cordon: CordonGpuArgs,
    /// Evict also pods that no controller creates again
    #[arg(long)]
    pub force: bool,
    /// Time for the pods to end, in seconds [default: as each pod says]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub grace_period: Option<u32>,
    /// Time after which the command fails, such as 90s or 10m [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
}

/// Parses a time such as `90s`, `10m` or `1h30m`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let parsed = text.parse::<SignedDuration>().ok().filter(SignedDuration::is_positive);
    let parsed = parsed.and_then(|duration| Duration::try_from(duration).ok());
    parsed.ok_or_else(|| "must be a time above zero, such as 90s, 10m or 1h30m".to_owned())
}
