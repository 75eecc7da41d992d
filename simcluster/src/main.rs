//! `tessera-simcluster`: the demo, a cluster to play with, and the inside of the container stand-in.

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

fn main() -> ExitCode {
    let outcome = match Args::parse().command {
        Command::ContainerInit { spec } => container::supervise(&spec),
        Command::ContainerEnter { spec } => container::enter(&spec),
        Command::NamespacesTryOut => namespaces::try_out(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tessera-simcluster: {error}");
            ExitCode::FAILURE
        }
    }
}
