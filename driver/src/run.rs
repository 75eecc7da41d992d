//! From flags to a driver, and from a signal to its end.

use std::{sync::Arc, time::Duration};

use anyhow::Context;
use tessera_gpu::{GpuLibrary, NvmlLibrary, NvmlOptions};
use tessera_runtime::cluster::client;
use tessera_runtime::{log, signals::stop_on_signal};

use crate::{
    args::Args,
    base_spec::DriverRoot,
    driver::{Driver, Edges, Settings},
    http,
    slices::SliceSource,
    state::mounts::KernelMounts,
};

/// Runs the driver until SIGTERM or SIGINT.
///
/// # Errors
/// What keeps it from starting, or from going on. Missing GPUs and an unreachable API server do
/// not.
pub async fn run(args: Args) -> anyhow::Result<()> {
    args.check()?;
    let Args {
        node_name,
        kubeconfig,
        kubelet_root,
        pod_uid,
        cdi_dir,
        state_dir,
        driver_root,
        driver_root_host,
        nvml_library,
        sysfs_root,
        intercept_library,
        intercept,
        context_memory,
        memory_percent,
        mps,
        exclude_gpus,
        device_order,
        mode,
        stock_drain_seconds,
        other_allocators,
        metrics_address,
        log_format,
        print_slices,
    } = args;
    let options = NvmlOptions {
        library: nvml_library,
        driver_root: driver_root.clone(),
        sysfs_root,
        exclude: exclude_gpus.into_iter().collect(),
    };
    let gpus = Arc::new(NvmlLibrary::new(options));
    if print_slices {
        let inventory = gpus.inventory().context("the GPUs cannot be looked at")?;
        let slices =
            SliceSource::new(node_name, device_order, mode).with_memory_ratio(memory_percent);
        let slices = slices.with_mps(mps);
        print!("{}", slices.as_yaml(inventory)?);
        return Ok(());
    }
    log::start(log_format);
    let stop = stop_on_signal("told to stop")?;

    let driver_root_host = driver_root_host.unwrap_or_else(|| driver_root.clone());
    let settings = Settings {
        node: node_name,
        kubelet_root,
        pod_uid: pod_uid.filter(|uid| !uid.is_empty()),
        cdi_dir,
        state_dir,
        driver_root: DriverRoot::new(driver_root, driver_root_host),
        intercept_library,
        intercept,
        context_memory,
        memory_ratio: memory_percent,
        mps,
        device_order,
        mode,
        stock_drain: Duration::from_secs(stock_drain_seconds.into()),
        on_other_allocator: other_allocators,
        proc: "/proc".into(),
    };
    let edges = Edges {
        client: client(kubeconfig.as_deref()).await?,
        gpus,
        mounts: Arc::new(KernelMounts),
    };
    let mut driver = Driver::start(settings, edges).await?;
    if let Some(address) = metrics_address.0 {
        let bound = http::serve(address, driver.endpoints(), driver.stopping()).await;
        let bound =
            bound.with_context(|| format!("--metrics-address {address} cannot be served"))?;
        tracing::info!(%bound, "serving /metrics and /healthz");
    }

    let failure = tokio::select! {
        () = stop.cancelled() => None,
        failure = driver.failed() => Some(failure),
    };
    tracing::info!("stopping; running pods are not touched");
    driver.stop().await;
    failure.map_or(Ok(()), |failure| Err(anyhow::anyhow!(failure)))
}
