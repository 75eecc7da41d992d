//! `tessera-simcluster`: the demo, an interactive cluster, and the programs inside a fake
//! container.

mod demo;
mod serve;
mod testbed;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tessera_simcluster::node::{container, namespaces};

/// A simulated Kubernetes cluster on this machine, around the real Tessera.
#[derive(Debug, Parser)]
#[command(version)]
struct SimclusterArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show all of Tessera in a few seconds, on fake GPUs.
    Demo(demo::DemoArgs),
    /// Run a cluster with two nodes and fake GPUs until interrupted.
    Serve(serve::ServeArgs),
    /// Act on a node of a cluster run by `serve`, with the commands of e2e/cluster/node.sh:
    /// restart|stop|kill|start NODE kubelet|driver, the same for `control-plane controller`,
    /// policies control-plane on|off, residue NODE, gpu NODE EVENT...; and chaos begin SEED
    /// SECONDS, chaos report, chaos end, clock NODE|control-plane SECONDS.
    Node(serve::NodeArgs),
    /// Supervise one container.
    #[command(name = container::INIT, hide = true)]
    ContainerInit { spec: PathBuf },
    /// Become one container's program.
    #[command(name = container::ENTER, hide = true)]
    ContainerEnter { spec: PathBuf },
    /// Succeed if namespaces and mounts are available.
    #[command(name = namespaces::CHECK, hide = true)]
    NamespacesCheck,
}

/// No runtime here: namespaces must be entered by the only thread of a process.
fn main() -> ExitCode {
    let outcome = match SimclusterArgs::parse().command {
        Command::Demo(args) => demo::demo(args),
        Command::Serve(args) => serve::serve(args),
        Command::Node(args) => serve::node(args),
        Command::ContainerInit { spec } => done(container::supervise(&spec)),
        Command::ContainerEnter { spec } => done(container::enter(&spec)),
        Command::NamespacesCheck => done(namespaces::check()),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("tessera-simcluster: {error:#}");
        ExitCode::FAILURE
    })
}

fn done(outcome: std::io::Result<()>) -> anyhow::Result<ExitCode> {
    Ok(outcome.map(|()| ExitCode::SUCCESS)?)
}
