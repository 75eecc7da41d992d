//! `tessera-driver`: the DRA kubelet plugin.

use std::time::Duration;

use clap::Parser;
use tessera_driver::{args::DriverArgs, run};

/// Time for which blocking work may finish at the end. A call of NVML may hang for ever.
const GRACE: Duration = Duration::from_secs(5);

fn main() -> anyhow::Result<()> {
    let args = DriverArgs::parse();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(run::run(args));
    runtime.shutdown_timeout(GRACE);
    result
}
