//! From flags to a keeper, and from a signal to its end.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::{
    args::{Args, LogFormat},
    keeper::{self, Settings},
};

/// Keeps daemons until SIGTERM or SIGINT.
///
/// # Errors
/// What keeps it from starting.
pub fn run(args: Args) -> anyhow::Result<()> {
    start_logging(args.log_format);
    // This thread starts the daemons, and they die with it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = stop_on_signal()?;
        keeper::keep(settings(args), stop).await?;
        tracing::info!("stopped");
        Ok(())
    })
}

fn settings(args: Args) -> Settings {
    let Args {
        state_dir,
        driver_root,
        mps_control,
        multi_user,
        shm_size,
        poll_interval,
        health_interval,
        answer_timeout,
        start_timeout,
        stop_timeout,
        log_format: _,
        stage: _,
    } = args;
    Settings {
        state_dir,
        driver_root,
        mps_control,
        multi_user,
        shm_size,
        poll_interval,
        health_interval,
        answer_timeout,
        start_timeout,
        stop_timeout,
    }
}

fn stop_on_signal() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping, and the MPS daemons with it");
        stopping.cancel();
    });
    Ok(stop)
}

fn start_logging(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => subscriber.init(),
        LogFormat::Json => subscriber.json().init(),
    }
}
