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
use crate::testbed::{self, TestBed};

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
    let Some(directory) = testbed::namespaces::directory() else {
        return match namespaces::check_support(&std::env::current_exe()?) {
            Ok(()) => testbed::namespaces::run_inside(),
            Err(reason) => without::run(&Screen::of_stdout(), &args.worlds, &reason),
        };
    };
    testbed::namespaces::isolate()?;
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
        raised = TestBed::start(options) => raised?,
        _ = terminate.recv() => return Ok(ExitCode::FAILURE),
        _ = interrupt.recv() => return Ok(ExitCode::FAILURE),
    };
    let mut test_bed = raised;
    let client = test_bed.client();
    let outcome = tokio::select! {
        outcome = tour::walk(&screen, &client) => outcome.map(|()| ExitCode::SUCCESS),
        exited = test_bed.exited() => Err(exited),
        _ = terminate.recv() => Ok(ExitCode::FAILURE),
        _ = interrupt.recv() => Ok(ExitCode::FAILURE),
    };
    if keep && outcome.is_ok() {
        tour::keep(&screen, test_bed.kubeconfig(), test_bed.directory());
        tokio::select! {
            exited = test_bed.exited() => screen.say(&format!("{exited:#}")),
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
    if outcome.is_err() {
        test_bed.print_logs();
    }
    test_bed.stop().await?;
    tour::end(&screen);
    outcome
}
