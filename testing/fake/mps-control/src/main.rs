//! Fake `nvidia-cuda-mps-control`.

use std::{io, process::ExitCode};

use clap::Parser;
use tessera_fake_mps_control::{daemon, environment::Environment, front_end};

/// Fake of nvidia-cuda-mps-control. Without flags it sends the commands of its standard input to
/// the daemon.
#[derive(Debug, Parser)]
#[command(name = "fake-mps-control", version)]
struct Args {
    /// Run the daemon in the foreground.
    #[arg(short = 'f')]
    foreground: bool,

    /// Serve clients of all users at the same time; accepted, and always the case.
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
