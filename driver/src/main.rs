//! The DRA kubelet plugin.

use clap::Parser;
use tessera_driver::{args::Args, run};

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    run::run(Args::parse()).await
}
