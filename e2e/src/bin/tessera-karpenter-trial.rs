//! `tessera-karpenter-trial`, the program behind `e2e/cluster/karpenter.sh`.

use clap::{Parser, Subcommand, ValueEnum};
use kube::Client;
use tessera_api::slice::Fence;
use tessera_e2e::karpenter;

/// Commands used by e2e/cluster/karpenter.sh.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// The fence that keeps kube-scheduler from the GPUs.
    #[arg(long, value_enum, global = true, default_value_t = FenceArgument::Rule)]
    fence: FenceArgument,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the ResourceSlices of a new node as JSON.
    Slices,
    /// Run the trial on the control plane of $KUBECONFIG, where Karpenter runs.
    Run,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum FenceArgument {
    Rule,
    Taint,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Arguments { command, fence } = Arguments::parse();
    let fence = match fence {
        FenceArgument::Rule => Fence::Rule,
        FenceArgument::Taint => Fence::Taint,
    };
    match command {
        Command::Slices => {
            println!("{}", serde_json::to_string(&karpenter::template_slices(fence)?)?);
            Ok(())
        }
        Command::Run => karpenter::run(&Client::try_default().await?, fence).await,
    }
}
