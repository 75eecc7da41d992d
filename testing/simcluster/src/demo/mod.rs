//! `demo`: the whole of Tessera in a few seconds, for somebody who sees it for the first time.

mod manifests;
mod screen;
mod tables;
mod tour;
mod without;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tessera_simcluster::node::namespaces;
use tokio::signal::unix::{SignalKind, signal};

use self::screen::Screen;
use crate::serve::{self, WORLDS};
use crate::stage::{Stage, nest};

/// Nobody watches a demo that waits for production's pauses.
const SYNC_PERIOD: Duration = Duration::from_millis(500);

/// Flags of `demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Leave everything running at the end, for kubectl, until Ctrl-C.
    #[arg(long)]
    keep: bool,
    /// Directory of the fake worlds.
    #[arg(long, default_value = WORLDS)]
    worlds: PathBuf,
}

/// Shows what there is to show. Fails if something does not go as told.
pub(crate) fn demo(args: DemoArgs) -> anyhow::Result<ExitCode> {
    let Some(directory) = nest::directory() else {
        return match namespaces::allowed(&std::env::current_exe()?) {
            Ok(()) => nest::run_inside(),
            Err(reason) => without::run(&Screen::of_stdout(), &args.worlds, &reason),
        };
    };
    nest::settle()?;
    serve::log_to_stderr();
    let reactor = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    reactor.block_on(run(args, directory))
}

async fn run(args: DemoArgs, directory: PathBuf) -> anyhow::Result<ExitCode> {
    let DemoArgs { keep, worlds } = args;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let screen = Screen::of_stdout();
    let mut options = serve::options(directory, &worlds)?;
    options.sync_period = SYNC_PERIOD;
    tour::introduce(&screen, &options);
    // Dropping what is half raised kills it: this is the first process of its namespace.
    let raised = tokio::select! {
        raised = Stage::raise(options) => raised?,
        _ = terminate.recv() => return Ok(ExitCode::FAILURE),
        _ = interrupt.recv() => return Ok(ExitCode::FAILURE),
    };
    let mut stage = raised;
    let client = stage.client();
    let outcome = tokio::select! {
        outcome = tour::walk(&screen, &client) => outcome.map(|()| ExitCode::SUCCESS),
        died = stage.died() => Err(died),
        _ = terminate.recv() => Ok(ExitCode::FAILURE),
        _ = interrupt.recv() => Ok(ExitCode::FAILURE),
    };
    if keep && outcome.is_ok() {
        tour::keep(&screen, stage.kubeconfig(), stage.directory());
        tokio::select! {
            died = stage.died() => screen.say(&format!("{died:#}")),
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
    if outcome.is_err() {
        stage.print_logs();
    }
    stage.lower().await?;
    tour::end(&screen);
    outcome
}
