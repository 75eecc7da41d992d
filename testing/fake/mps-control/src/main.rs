//! `nvidia-cuda-mps-control`, without a GPU.

use std::{io, process::ExitCode};

use clap::Parser;
use tessera_fake_mps_control::{daemon, environment::Environment, front_end};

/// Stands in for nvidia-cuda-mps-control: without flags it sends the commands on its standard input
/// to the daemon.
#[derive(Debug, Parser)]
#[command(name = "fake-mps-control", version)]
struct Args {
    /// Be the daemon, in the foreground.
    #[arg(short = 'f')]
    foreground: bool,

    /// Serve clients of all users at once; taken, and what this stand-in does in any case.
    #[arg(short = 'M', requires = "foreground")]
    multi_user: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let environment = Environment::of_this_process()?;
    if args.foreground {
        return Ok(daemon::run(&environment)?);
    }
    Ok(front_end::send(&environment.socket(), io::stdin().lock(), &mut io::stdout().lock())?)
}
