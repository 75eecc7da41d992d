//! Arguments of `resize`.

use std::time::Duration;

use clap::Args;
use tessera_api::quantity::Quantity;

use super::maintenance::duration;
use crate::output::OutputFormat;

/// Arguments of `resize`.
#[derive(Debug, Args)]
#[group(id = "amounts", required = true, multiple = true, args = ["memory", "cores"])]
pub struct ResizeArgs {
    /// The ResourceClaim, or pod/POD for that of a pod
    #[arg(value_name = "CLAIM")]
    pub claim: String,
    /// Device memory of the share, such as 20Gi
    #[arg(long, value_name = "QUANTITY", value_parser = amount)]
    pub memory: Option<Quantity>,
    /// Percent of the GPU, 0 to 100
    #[arg(long, value_name = "PERCENT", value_parser = amount)]
    pub cores: Option<Quantity>,
    /// The request of the claim [default: its only one]
    #[arg(long, value_name = "NAME")]
    pub request: Option<String>,
    /// Time after which the change is withdrawn, such as 90s or 10m
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "60s")]
    pub timeout: Duration,
    /// Return once the change is asked for, and leave it to be applied when there is room
    #[arg(long)]
    pub no_wait: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: OutputFormat,
}

fn amount(text: &str) -> Result<Quantity, String> {
    let amount = Quantity::parse(text).map_err(|error| error.to_string())?;
    if amount.is_negative() { Err("must not be negative".to_owned()) } else { Ok(amount) }
}
