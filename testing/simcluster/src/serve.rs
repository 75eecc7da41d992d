//! `serve` and `node`: a cluster to play with, and for the scenarios.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tessera_runtime::atomic_file;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::stage::programs::Programs;
use crate::stage::{NODES, Stage, StageOptions, control, nest};

/// Where the world files of the repository are.
pub(crate) const WORLDS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fake/world/worlds");

/// The world of the first node.
pub(crate) const NODE_WORLD: &str = NODES[0].1;

/// The pause of the real cluster's kubelets in `e2e/cluster`.
pub(crate) const SYNC_PERIOD: Duration = Duration::from_secs(5);

/// Flags of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Directory for kubeconfig, the socket of `node`, and a script `node.sh` that asks it.
    #[arg(long)]
    run_directory: PathBuf,
    /// Directory of the fake worlds.
    #[arg(long, default_value = WORLDS)]
    worlds: PathBuf,
    /// Run driver and controller with a wall clock that can be set: `node chaos` needs it.
    #[arg(long)]
    clocks: bool,
}

/// Flags of `node`.
#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// The run directory of `serve`.
    #[arg(long)]
    run_directory: PathBuf,
    /// What to do.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Asks a running `serve`.
pub(crate) fn node(args: NodeArgs) -> anyhow::Result<ExitCode> {
    let reactor = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    reactor.block_on(control::ask(&args.run_directory.join("control.sock"), &args.words))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the cluster until SIGTERM or SIGINT.
pub(crate) fn serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let Some(directory) = nest::directory() else { return nest::run_inside() };
    nest::settle()?;
    log_to_stderr();
    let reactor = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    reactor.block_on(run(args, directory))?;
    Ok(ExitCode::SUCCESS)
}

/// Logs what RUST_LOG says; without it only what went wrong, and not that connections break when
/// everything ends.
pub(crate) fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| "error,kube_client=off".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

async fn run(args: ServeArgs, directory: PathBuf) -> anyhow::Result<()> {
    let ServeArgs { run_directory, worlds, clocks } = args;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    std::fs::create_dir_all(&run_directory)?;
    let mut stage = Stage::raise(StageOptions { clocks, ..options(directory, &worlds)? }).await?;
    let listener = UnixListener::bind(run_directory.join("control.sock"))
        .with_context(|| format!("another cluster uses `{}`", run_directory.display()))?;
    write_script(&run_directory)?;
    let publish = |path: &str, text: &str| {
        atomic_file::write(&run_directory.join(path), text.as_bytes(), 0o644)
    };
    publish("observer.kubeconfig", &stage.observer_kubeconfig())?;
    // Last: whoever waits for this file finds everything ready.
    publish("kubeconfig", &std::fs::read_to_string(stage.kubeconfig())?)?;
    println!("export KUBECONFIG={}", run_directory.join("kubeconfig").display());
    let outcome = tokio::select! {
        outcome = control::serve(listener, &mut stage) => outcome,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    for name in ["kubeconfig", "observer.kubeconfig", "control.sock", "node.sh"] {
        std::fs::remove_file(run_directory.join(name))?;
    }
    stage.lower().await?;
    outcome
}

/// The two nodes of the scenarios.
pub(crate) fn options(directory: PathBuf, worlds: &Path) -> anyhow::Result<StageOptions> {
    let nodes = NODES.map(|(name, world)| (name.to_owned(), worlds.join(format!("{world}.yaml"))));
    for (_, world) in &nodes {
        anyhow::ensure!(
            world.is_file(),
            "no world file `{}`; name the directory with --worlds",
            world.display()
        );
    }
    Ok(StageOptions {
        directory,
        programs: Programs::beside_this()?,
        nodes: nodes.into(),
        sync_period: SYNC_PERIOD,
        clocks: false,
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
