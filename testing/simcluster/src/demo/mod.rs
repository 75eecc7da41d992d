//! `demo`: all of Tessera in a few seconds, for a first look.

mod fallback;
mod manifests;
mod metrics;
mod screen;
mod steps;
mod tables;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tessera_simcluster::node::namespaces;
use tokio::signal::unix::{SignalKind, signal};

use self::screen::Screen;
use crate::serve::{self, WORLDS};
use crate::testbed::{self, TestBed};

/// Retry interval of the kubelets, shorter than in production.
const SYNC_PERIOD: Duration = Duration::from_millis(500);

/// Flags of `demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Keep the cluster running at the end, for kubectl, until Ctrl-C.
    #[arg(long)]
    keep: bool,
    /// Directory of the fake worlds.
    #[arg(long, default_value = WORLDS)]
    worlds: PathBuf,
}

/// Runs the demo. Fails if a step has an unexpected result.
pub(crate) fn demo(args: DemoArgs) -> anyhow::Result<ExitCode> {
    let Some(directory) = testbed::namespaces::directory() else {
        return match namespaces::check_support(&std::env::current_exe()?) {
            Ok(()) => testbed::namespaces::run_inside(),
            Err(reason) => fallback::run(&Screen::of_stdout(), &args.worlds, &reason),
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
    options.any_image = true;
    options.metrics = true;
    steps::introduce(&screen, &options);
    // Dropping a half-started test bed ends it: this is the first process of its namespace.
    let started = tokio::select! {
        started = TestBed::start(options) => started?,
        _ = terminate.recv() => return Ok(ExitCode::FAILURE),
        _ = interrupt.recv() => return Ok(ExitCode::FAILURE),
    };
    let mut test_bed = started;
    let (client, metrics) = (test_bed.client(), test_bed.metrics());
    let outcome = tokio::select! {
        outcome = steps::run(&screen, &client, &metrics) => outcome.map(|()| ExitCode::SUCCESS),
        exited = test_bed.exited() => Err(exited),
        _ = terminate.recv() => Ok(ExitCode::FAILURE),
        _ = interrupt.recv() => Ok(ExitCode::FAILURE),
    };
    let keeps = keep && outcome.is_ok();
    if keeps {
        steps::keep(&screen, test_bed.kubeconfig(), test_bed.directory(), &metrics)?;
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
    screen.gap();
    screen.say("Cleaned up.");
    if !keeps && outcome.is_ok() {
        steps::suggest_next(&screen)?;
    }
    outcome
}
