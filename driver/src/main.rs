//! `tessera-driver`: the DRA kubelet plugin.

use clap::Parser;
use tessera_driver::{args::DriverArgs, run};

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    run::run(DriverArgs::parse()).await
}
