//! `serve` and `node`: a cluster for interactive use and for the scenarios.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tessera_runtime::atomic_file;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::testbed::programs::Programs;
use crate::testbed::{self, NODES, TestBed, TestBedOptions, control};

/// Directory of the repository's world files.
pub(crate) const WORLDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fake/world/worlds");

/// World of the first node.
pub(crate) const NODE_WORLD: &str = NODES[0].1;

/// Retry interval of the real cluster's kubelets in `e2e/cluster`.
pub(crate) const SYNC_PERIOD: Duration = Duration::from_secs(5);

/// Flags of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Directory for kubeconfig, the socket of `node`, and a script `node.sh` that calls it.
    #[arg(long)]
    run_directory: PathBuf,
    /// Directory of the fake worlds.
    #[arg(long, default_value = WORLDS)]
    worlds: PathBuf,
    /// Run driver and controller with an adjustable wall clock, which `node chaos` needs.
    #[arg(long)]
    clocks: bool,
    /// Serve the metrics of driver and controller, each on a free port of the loopback interface
    /// that its command line names.
    #[arg(long)]
    metrics: bool,
}

/// Flags of `node`.
#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// The run directory of `serve`.
    #[arg(long)]
    run_directory: PathBuf,
    /// Command and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Sends a command to a running `serve`.
pub(crate) fn node(args: NodeArgs) -> anyhow::Result<ExitCode> {
    let reactor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    reactor.block_on(control::send(&args.run_directory.join("control.sock"), &args.words))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the cluster until SIGTERM or SIGINT.
pub(crate) fn serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let Some(directory) = testbed::namespaces::directory() else {
        return testbed::namespaces::run_inside();
    };
    testbed::namespaces::isolate()?;
    log_to_stderr();
    let reactor = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    reactor.block_on(run(args, directory))?;
    Ok(ExitCode::SUCCESS)
}

/// Logs as RUST_LOG sets it. By default only errors, without the connections broken at shutdown.
pub(crate) fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| "error,kube_client=off".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

async fn run(args: ServeArgs, directory: PathBuf) -> anyhow::Result<()> {
    let ServeArgs { run_directory, worlds, clocks, metrics } = args;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    std::fs::create_dir_all(&run_directory)?;
    let mut test_bed =
        TestBed::start(TestBedOptions { clocks, metrics, ..options(directory, &worlds)? }).await?;
    let listener = UnixListener::bind(run_directory.join("control.sock"))
        .with_context(|| format!("another cluster uses `{}`", run_directory.display()))?;
    write_script(&run_directory)?;
    let publish = |path: &str, text: &str| {
        atomic_file::write(&run_directory.join(path), text.as_bytes(), 0o644)
    };
    publish("observer.kubeconfig", &test_bed.observer_kubeconfig())?;
    // Last: a process that waits for this file finds everything ready.
    publish("kubeconfig", &std::fs::read_to_string(test_bed.kubeconfig())?)?;
    println!("export KUBECONFIG={}", run_directory.join("kubeconfig").display());
    let outcome = tokio::select! {
        outcome = control::serve(listener, &mut test_bed) => outcome,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    for name in ["kubeconfig", "observer.kubeconfig", "control.sock", "node.sh"] {
        std::fs::remove_file(run_directory.join(name))?;
    }
    test_bed.stop().await?;
    outcome
}

/// Returns the options of the two nodes of the scenarios.
pub(crate) fn options(directory: PathBuf, worlds: &Path) -> anyhow::Result<TestBedOptions> {
    let nodes = NODES.map(|(name, world)| (name.to_owned(), worlds.join(format!("{world}.yaml"))));
    for (_, world) in &nodes {
        anyhow::ensure!(
            world.is_file(),
            "no world file `{}`; name the directory with --worlds",
            world.display()
        );
    }
    Ok(TestBedOptions {
        directory,
        programs: Programs::beside_this()?,
        nodes: nodes.into(),
        sync_period: SYNC_PERIOD,
        clocks: false,
        any_image: false,
        metrics: false,
    })
}

fn write_script(run_directory: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let script = format!(
        "#!/bin/sh\nexec '{}' node --run-directory '{}' -- \"$@\"\n",
        std::env::current_exe()?.display(),
        run_directory.display()
    );
    let path = run_directory.join("node.sh");
    std::fs::write(&path, script)?;
    Ok(std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?)
}
