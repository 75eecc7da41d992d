//! MPS supervisor of a node.

use std::process::ExitCode;

use clap::Parser;
use tessera_mps::{
    args::{MpsArgs, SupervisorStage},
    run,
};

fn main() -> anyhow::Result<ExitCode> {
    let mut args = MpsArgs::parse();
    match args.stage.take() {
        Some(SupervisorStage::Enter(enter)) => Ok(enter.run()),
        None => run::run(args).map(|()| ExitCode::SUCCESS),
    }
}
