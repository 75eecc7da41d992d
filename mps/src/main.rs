//! The keeper of MPS daemons.

use std::process::ExitCode;

use clap::Parser;
use tessera_mps::{
    args::{Args, Stage},
    run,
};

fn main() -> anyhow::Result<ExitCode> {
    let mut args = Args::parse();
    match args.stage.take() {
        Some(Stage::Enter(enter)) => Ok(enter.run()),
        None => run::run(args).map(|()| ExitCode::SUCCESS),
    }
}
