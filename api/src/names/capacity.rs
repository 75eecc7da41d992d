//! Names of the capacities that devices carry. They are published without a domain, because up to
//! Kubernetes 1.37 a request must name them literally as the slice does.

/// Device memory, whole MiB.
pub const MEMORY: &str = "memory";
/// Percent of the GPU's compute, 0 to 100.
pub const CORES: &str = "cores";

/// Shares of the GPU.
pub const SHARES: &str = "shares";

/// Capacities of MIG devices besides [`MEMORY`]: name and meaning.
pub const ENGINES: [(&str, &str); 6] = [
    ("multiprocessors", "Streaming multiprocessors of a MIG device."),
    ("copyEngines", "Copy engines of a MIG device."),
    ("decoders", "Video decoders of a MIG device."),
    ("encoders", "Video encoders of a MIG device."),
    ("jpegEngines", "JPEG engines of a MIG device."),
    ("ofaEngines", "Optical flow engines of a MIG device."),
];

/// All capacities of GPUs: name and meaning.
pub const ALL: &[(&str, &str)] = &[
    (MEMORY, "Device memory in whole MiB; requests are rounded up to 1 MiB."),
    (
        CORES,
        "Percent of the GPU's compute, 0 to 100. `compute.policy` determines how it is enforced.",
    ),
    (
        SHARES,
        "Shares of the GPU, at most `driver.maxShares`. A request takes 1 unless it says more.",
    ),
];
