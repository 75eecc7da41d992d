//! From flags to a keeper, and from a signal to its end.

use tessera_runtime::{log, signals::stop_on_signal};

use crate::{
    args::Args,
    keeper::{self, Settings},
};

/// Keeps daemons until SIGTERM or SIGINT.
///
/// # Errors
/// What keeps it from starting.
pub fn run(args: Args) -> anyhow::Result<()> {
    log::start(args.log_format);
    // This thread starts the daemons, and they die with it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = stop_on_signal("stopping, and the MPS daemons with it")?;
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
