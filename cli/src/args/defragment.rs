//! Arguments of `defrag`.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::maintenance::duration;
use super::{OutputArgs, SourceArgs};
use crate::output::OutputFormat;

/// Arguments of `defrag`.
#[derive(Debug, Args)]
pub struct DefragArgs {
    /// The request that is to fit.
    #[command(subcommand)]
    pub request: DefragRequest,
}

/// A request that is to fit.
#[derive(Debug, Subcommand)]
pub enum DefragRequest {
    /// A pod that waits for devices
    #[command(visible_alias = "pods")]
    Pod(DefragPodArgs),
    /// One more pod like those that the cluster has most of
    Requests(DefragRequestsArgs),
}

/// Arguments of `defrag requests`.
#[derive(Debug, Args)]
pub struct DefragRequestsArgs {
    /// Number of requests, the most frequent first
    #[arg(long, value_name = "NUMBER", default_value = "5")]
    pub top: NonZeroUsize,
    /// The source of the objects.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Output options.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `defrag pod`.
#[derive(Debug, Args)]
pub struct DefragPodArgs {
    /// The pod
    #[arg(value_name = "NAME")]
    pub pod: String,
    /// Evict the pods to move, and wait until the pod has its devices
    #[arg(long, conflicts_with = "snapshot")]
    pub apply: bool,
    /// Evict also pods that no controller creates again
    #[arg(long, requires = "apply")]
    pub force: bool,
    /// Time after which the command fails, such as 90s or 10m [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = duration, requires = "apply")]
    pub timeout: Option<Duration>,
    /// The source of the objects.
    #[command(flatten)]
    pub source: SourceArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: OutputFormat,
}
