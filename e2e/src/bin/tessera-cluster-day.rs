//! `tessera-cluster-day`, the program behind `e2e/cluster/day.sh`, which starts the control plane.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kube::{Client, Config};
use tessera_e2e::rolling_day::{self, DaySize};

/// Commands used by e2e/cluster/day.sh.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Let pods and groups of three priorities arrive, run, be preempted and end on hollow nodes of
    /// a real control plane, and measure what it costs.
    ///
    /// etcd, kube-apiserver, kube-controller-manager, kube-scheduler and tessera-controller are
    /// started in namespaces of their own. Needs root, and Go for the first build. Standard output
    /// contains only the figures.
    #[command(override_usage = "e2e/cluster/day.sh [OPTIONS]")]
    Check(Options),
    /// Run the day on the cluster of $KUBECONFIG and print its figures.
    Run(RunOptions),
}

#[derive(Debug, Args)]
struct Options {
    #[command(flatten)]
    size: DaySize,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Debug, Args)]
struct RunOptions {
    #[command(flatten)]
    options: Options,
    /// Directory of files named after components that contain their process IDs.
    #[arg(long, value_name = "DIRECTORY")]
    pids: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Lines.
    Text,
    /// One object.
    Json,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let RunOptions { options: Options { size, output }, pids } = match Arguments::parse().command {
        Command::Check(_) => {
            println!("checked");
            return Ok(());
        }
        Command::Run(options) => options,
    };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = Client::try_from(Config::infer().await?)?;
    let figures = rolling_day::run(size, &client, &pids).await?;
    match output {
        Output::Text => print!("{figures}"),
        Output::Json => println!("{}", serde_json::to_string_pretty(&figures)?),
    }
    Ok(())
}
