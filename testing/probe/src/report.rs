//! Output of the probe.

use std::io::Write as _;

use serde::Serialize;

use crate::tamper::Tampered;

/// One line of output.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "lowercase", rename_all_fields = "camelCase")]
pub(crate) enum Event {
    Tampered(Tampered),
    See(DeviceList),
    Filled(Filled),
    Computed(Computed),
    Holding {
        #[serde(skip_serializing_if = "Option::is_none")]
        taken_bytes: Option<u64>,
    },
    Error(Failure),
}

/// The visible GPUs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeviceList {
    pub(crate) devices: Vec<Device>,
    pub(crate) cuda_version: i32,
}

/// A GPU as CUDA and NVML report it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Device {
    pub(crate) index: i32,
    pub(crate) uuid: String,
    pub(crate) name: String,
    pub(crate) multiprocessors: i32,
    pub(crate) cuda_total_bytes: u64,
    pub(crate) cuda_free_bytes: u64,
    pub(crate) nvml_total_bytes: u64,
    pub(crate) nvml_used_bytes: u64,
    pub(crate) nvml_free_bytes: u64,
}

/// Result of allocating up to the limit.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Filled {
    pub(crate) device: i32,
    pub(crate) taken_bytes: u64,
    pub(crate) refused_with: String,
    pub(crate) nvml_used_bytes: u64,
    pub(crate) nvml_total_bytes: u64,
    pub(crate) cuda_free_bytes: u64,
}

/// GPU time of launched kernels, as a share of the elapsed time.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Computed {
    pub(crate) launches: u32,
    pub(crate) seconds: f64,
    pub(crate) gpu_seconds: f64,
    pub(crate) gpu_percent: f64,
}

/// A call that failed.
#[derive(Debug, Serialize)]
pub(crate) struct Failure {
    /// Name of the function.
    pub(crate) call: String,
    /// Returned code.
    pub(crate) code: i32,
    /// Name of the code, or error of the loader.
    pub(crate) name: String,
}

/// Writes a line.
pub(crate) fn report(event: &Event) {
    let mut out = std::io::stdout().lock();
    // The reader may have closed the pipe.
    let _ = serde_json::to_writer(&mut out, event);
    let _ = out.write_all(b"\n");
    let _ = out.flush();
}
