//! `tessera-simcluster`: the demo, a cluster to play with, and the inside of the container
//! stand-in.

mod demo;
mod serve;
mod stage;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tessera_simcluster::node::{container, namespaces};

/// A Kubernetes cluster of stand-ins on this machine, around the real Tessera.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Shows the whole of Tessera in a few seconds, on fake GPUs.
    Demo(demo::DemoArgs),
    /// Runs a cluster with two nodes and fake GPUs until it is interrupted.
    Serve(serve::ServeArgs),
    /// Acts on a node of a cluster that `serve` runs, in the words of e2e/cluster/node.sh:
    /// restart|stop|kill|start NODE kubelet|driver, the same for `control-plane controller`,
    /// policies control-plane on|off, residue NODE, gpu NODE HAPPENING...; and chaos begin SEED
    /// SECONDS, chaos report, chaos end, clock NODE|control-plane SECONDS.
    Node(serve::NodeArgs),
    /// Supervises one container.
    #[command(name = container::INIT, hide = true)]
    ContainerInit { spec: PathBuf },
    /// Becomes one container's program.
    #[command(name = container::ENTER, hide = true)]
    ContainerEnter { spec: PathBuf },
    /// Succeeds where namespaces and mounts are to be had.
    #[command(name = namespaces::TRY_OUT, hide = true)]
    NamespacesTryOut,
}

/// No runtime here: namespaces are entered by the only thread of a process.
fn main() -> ExitCode {
    let outcome = match Args::parse().command {
        Command::Demo(args) => demo::demo(args),
        Command::Serve(args) => serve::serve(args),
        Command::Node(args) => serve::node(args),
        Command::ContainerInit { spec } => done(container::supervise(&spec)),
        Command::ContainerEnter { spec } => done(container::enter(&spec)),
        Command::NamespacesTryOut => done(namespaces::try_out()),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("tessera-simcluster: {error:#}");
        ExitCode::FAILURE
    })
}

fn done(outcome: std::io::Result<()>) -> anyhow::Result<ExitCode> {
    Ok(outcome.map(|()| ExitCode::SUCCESS)?)
}
