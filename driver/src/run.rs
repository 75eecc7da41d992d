//! Runs the driver from its flags until a signal or a failure.

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use tessera_gpu::{GpuLibrary, NvmlLibrary, NvmlOptions};
use tessera_runtime::cluster::client;
use tessera_runtime::{log, open_files, server::health::probe, signals::stop_on_signal};
use tokio_util::sync::CancellationToken;

use crate::{
    args::{DriverArgs, DriverCommand},
    base_spec::DriverRoot,
    driver::{Driver, DriverDependencies, DriverSettings},
    slices::SliceSource,
    state::mounts::KernelMounts,
};

/// Runs the driver until SIGTERM or SIGINT.
///
/// # Errors
/// The reason why it cannot start or continue: an unexpected end of a task is one. Missing GPUs and
/// an unreachable API server are no errors.
pub async fn run(args: DriverArgs) -> anyhow::Result<()> {
    args.check()?;
    if let Some(DriverCommand::Healthz) = args.command {
        return Ok(probe(&args.health_socket.context("healthz needs --health-socket")?)?);
    }
    let gpus = Arc::new(NvmlLibrary::new(nvml_options(&args)));
    let DriverArgs {
        node_name,
        kubeconfig,
        kubelet_root,
        pod_uid,
        cdi_dir,
        state_dir,
        driver_root,
        driver_root_host,
        nvml_library: _,
        device_directory: _,
        sysfs_root: _,
        proc_root: _,
        mig: _,
        intercept_library,
        intercept,
        context_memory,
        default_compute_policy,
        memory_percent,
        cores_percent,
        max_shares,
        correct_gpu_time,
        mps,
        exclude_gpus: _,
        device_order,
        mode,
        fence,
        stock_drain_seconds,
        other_allocators,
        other_resources,
        metrics_address,
        health_socket,
        log_format,
        print_slices,
        command: _,
    } = args;
    if print_slices {
        let slices = SliceSource::new(node_name, device_order, mode)
            .with_fence(fence)
            .with_memory_ratio(memory_percent)
            .with_cores_ratio(cores_percent)
            .with_max_shares(max_shares)
            .with_mps(mps);
        return print(&slices, &*gpus);
    }
    log::start(log_format);
    open_files::raise_limit();
    let stop = stop_on_signal("received stop signal")?;

    let driver_root_host = driver_root_host.unwrap_or_else(|| driver_root.clone());
    let settings = DriverSettings {
        node: node_name,
        kubelet_root,
        pod_uid: pod_uid.filter(|uid| !uid.is_empty()),
        cdi_dir,
        state_dir,
        driver_root: DriverRoot::new(driver_root, driver_root_host),
        intercept_library,
        intercept,
        context_memory,
        default_compute: default_compute_policy,
        memory_ratio: memory_percent,
        cores_ratio: cores_percent,
        max_shares,
        correct_gpu_time,
        mps,
        device_order,
        mode,
        fence,
        stock_drain: Duration::from_secs(stock_drain_seconds.into()),
        on_other_allocator: other_allocators,
        other_resources: other_resources.into_iter().collect(),
        proc: "/proc".into(),
    };
    let dependencies = DriverDependencies {
        client: client(kubeconfig.as_deref()).await?,
        gpus: Arc::clone(&gpus) as Arc<dyn GpuLibrary>,
        mig: gpus,
        mounts: Arc::new(KernelMounts),
    };
    let mut driver = Driver::start(settings, dependencies).await?;
    if let Some(address) = metrics_address.0 {
        let bound = driver.serve_http(address)?;
        tracing::info!(%bound, "serving /metrics and /healthz");
    }
    if let Some(path) = health_socket {
        driver.serve_health(&path)?;
    }
    run_until(driver, stop).await
}

/// Returns the options of the GPU library.
fn nvml_options(args: &DriverArgs) -> NvmlOptions {
    NvmlOptions {
        library: args.nvml_library.clone(),
        driver_root: args.driver_root.clone(),
        device_directory: args.device_directory.clone(),
        sysfs_root: args.sysfs_root.clone(),
        proc_root: args.proc_root.clone(),
        mig: args.mig,
        exclude: args.exclude_gpus.iter().cloned().collect(),
    }
}

/// Prints the slices of the node's GPUs.
fn print(slices: &SliceSource, gpus: &dyn GpuLibrary) -> anyhow::Result<()> {
    let inventory = gpus.inventory().context("cannot read the inventory of GPUs")?;
    print!("{}", slices.as_yaml(inventory)?);
    Ok(())
}

/// Runs a started driver until `stop`, and stops it.
///
/// # Errors
/// [`TaskFailure`](tessera_runtime::supervisor::TaskFailure), if a task of the driver ended before.
pub async fn run_until(mut driver: Driver, stop: CancellationToken) -> anyhow::Result<()> {
    let result = tokio::select! {
        () = stop.cancelled() => Ok(()),
        failure = driver.failed() => Err(failure),
    };
    tracing::info!("stopping; running pods are not affected");
    driver.stop().await;
    Ok(result?)
}
