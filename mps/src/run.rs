//! Runs the supervisor from parsed flags until a signal.

use tessera_runtime::{log, signals::stop_on_signal};

use crate::{
    args::MpsArgs,
    supervisor::{self, SupervisorSettings},
};

/// Supervises the daemons until SIGTERM or SIGINT.
///
/// # Errors
/// Returns the error that prevents the start.
pub fn run(args: MpsArgs) -> anyhow::Result<()> {
    log::start(args.log_format);
    // This thread starts the daemons, and they are killed when it exits.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = stop_on_signal("stopping tessera-mps and its MPS daemons")?;
        supervisor::supervise(settings(args), stop).await?;
        tracing::info!("stopped");
        Ok(())
    })
}

fn settings(args: MpsArgs) -> SupervisorSettings {
    let MpsArgs {
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
    SupervisorSettings {
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
