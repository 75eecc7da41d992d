//! Command-line flags, each also an environment variable.

use std::path::PathBuf;

use clap::Parser;
use tessera_api::{
    config::ComputePolicy,
    names::{ExtendedResourceName, GpuUuid, NodeName},
    slice::{CoresRatio, DeviceOrder, MaxShares, MemoryRatio},
};
use tessera_runtime::{address::ListenAddress, log::LogFormat};

use crate::{
    context_memory::ContextMemory,
    intercept::InterceptMode,
    mode::{DriverMode, FenceKind},
    other_allocators::OtherAllocatorPolicy,
};

/// Shares the GPUs of one node: publishes them as ResourceSlices and prepares the claims that are
/// allocated to it.
#[derive(Clone, Debug, Parser)]
#[command(name = "tessera-driver", version)]
pub struct DriverArgs {
    /// Name of this Node.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: NodeName,

    /// Kubeconfig file of the API server [default: KUBECONFIG or ~/.kube/config, then the pod's
    /// service account].
    #[arg(long, env = "TESSERA_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// Root directory of the kubelet.
    #[arg(long, env = "TESSERA_KUBELET_ROOT", default_value = "/var/lib/kubelet")]
    pub kubelet_root: PathBuf,

    /// UID of the driver's pod. Makes the names of its sockets unique: during a rolling update the
    /// old and the new pod serve at the same time.
    #[arg(long, env = "POD_UID")]
    pub pod_uid: Option<String>,

    /// Directory from which the container runtime reads CDI specs.
    #[arg(long, env = "TESSERA_CDI_DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,

    /// Directory of the driver's state: a tmpfs, at the same path on the host.
    #[arg(long, env = "TESSERA_STATE_DIR", default_value = "/run/tessera")]
    pub state_dir: PathBuf,

    /// Root of the NVIDIA driver's files, as seen by this process.
    #[arg(long, env = "TESSERA_DRIVER_ROOT", default_value = "/")]
    pub driver_root: PathBuf,

    /// Root of the NVIDIA driver's files as seen by the container runtime on the host [default:
    /// the value of --driver-root].
    #[arg(long, env = "TESSERA_DRIVER_ROOT_HOST")]
    pub driver_root_host: Option<PathBuf>,

    /// Path of the NVML library [default: searched under --driver-root, then by the dynamic
    /// loader].
    #[arg(long, env = "TESSERA_NVML_LIBRARY")]
    pub nvml_library: Option<PathBuf>,

    /// Directory in which device nodes are created for GPUs that are added while the driver runs:
    /// /dev of a privileged container, which has the nodes of its start only [default: none are
    /// created].
    #[arg(long, env = "TESSERA_DEVICE_DIRECTORY", value_name = "PATH")]
    pub device_directory: Option<PathBuf>,

    /// Mount point of sysfs.
    #[arg(long, env = "TESSERA_SYSFS_ROOT", default_value = "/sys")]
    pub sysfs_root: PathBuf,

    /// Mount point of procfs.
    #[arg(long, env = "TESSERA_PROC_ROOT", default_value = "/proc")]
    pub proc_root: PathBuf,

    /// Publish GPUs in MIG mode as MIG devices, and create and destroy their instances. MIG mode
    /// itself is never changed. Instances that no claim has are left as they are. Without it, GPUs
    /// in MIG mode are not published.
    #[arg(long, env = "TESSERA_MIG")]
    pub mig: bool,

    /// Path of the interceptor library, which containers get.
    #[arg(
        long,
        env = "TESSERA_INTERCEPT_LIBRARY",
        default_value = "/usr/local/lib/tessera/libtessera_intercept.so"
    )]
    pub intercept_library: PathBuf,

    /// Injection of the interceptor into containers: preload (into every program), proxy (replaces
    /// libcuda and NVML) or both. The proxies, libtessera_intercept_cuda.so and
    /// libtessera_intercept_nvml.so, are in the directory of --intercept-library. Prepared claims
    /// do not change.
    #[arg(long, env = "TESSERA_INTERCEPT", default_value = "preload")]
    pub intercept: InterceptMode,

    /// Memory charged to a share for each CUDA context of its processes, for example 512Mi. The
    /// CUDA driver allocates it before a program allocates any. `make bench-gpu` measures it. It
    /// counts until the process has been measured by NVML, for about three seconds. 0 charges
    /// nothing until then. Prepared claims do not change.
    #[arg(long, env = "TESSERA_CONTEXT_MEMORY", value_name = "QUANTITY", default_value_t)]
    pub context_memory: ContextMemory,

    /// Enforcement of `cores` for claims without `compute.policy`: Balance (at least), Fixed (at
    /// most) or None. Prepared claims do not change.
    #[arg(long, env = "TESSERA_DEFAULT_COMPUTE_POLICY", default_value_t = ComputePolicy::Balance)]
    pub default_compute_policy: ComputePolicy,

    /// Published memory of each GPU, in percent of its memory, 100 to 800. Above 100 only claims
    /// with `memory.oversubscribe: true` get GPUs of this node, and their memory may be moved
    /// to the host; not in mode stock. Prepared claims do not change, and a GPU is published
    /// at 100 percent while it has a share that may not be oversubscribed.
    #[arg(long, env = "TESSERA_MEMORY_PERCENT", value_name = "PERCENT", default_value = "100", value_parser = memory_percent)]
    pub memory_percent: MemoryRatio,

    /// Published cores of each GPU, in percent, 100 to 200. A claim has at most 100. Above 100,
    /// guaranteed cores are scaled down while shares that are guaranteed more than the GPU have
    /// work. Prepared claims do not change.
    #[arg(long, env = "TESSERA_CORES_PERCENT", value_name = "PERCENT", default_value = "100", value_parser = cores_percent)]
    pub cores_percent: CoresRatio,

    /// Maximum number of shares of one GPU, 1 to 128. Published as the capacity `shares`, of which
    /// each request takes 1 unless it says more. Prepared claims do not change.
    #[arg(long, env = "TESSERA_MAX_SHARES", value_name = "NUMBER", default_value_t)]
    pub max_shares: MaxShares,

    /// Correct charged GPU time by what NVML reports for each process. With false, caps hold by
    /// CUDA events alone: streams that run at the same time are charged several times, copies not
    /// at all.
    #[arg(
        long,
        env = "TESSERA_CORRECT_GPU_TIME",
        default_value_t = true,
        action = clap::ArgAction::Set
    )]
    pub correct_gpu_time: bool,

    /// Allows claims to share a GPU by MPS (`sharing: MPS` in their GpuConfig). tessera-mps runs
    /// the control daemons; it must run on this node with the same --state-dir. Not in mode
    /// stock. Prepared claims do not change.
    #[arg(long, env = "TESSERA_MPS")]
    pub mps: bool,

    /// UUID of a GPU that is not shared; may be repeated.
    #[arg(
        long = "exclude-gpu",
        env = "TESSERA_EXCLUDE_GPU",
        value_name = "UUID",
        value_delimiter = ','
    )]
    pub exclude_gpus: Vec<GpuUuid>,

    /// Order of GPUs in the slices: index, free-last, free-first or clique. An allocator that takes
    /// the first GPU that fits then packs (free-last), spreads (free-first), or prefers the GPUs of
    /// one NVLink clique.
    #[arg(long, env = "TESSERA_DEVICE_ORDER", default_value = "index")]
    pub device_order: DeviceOrder,

    /// Allocator of the GPUs: managed (tessera-controller) or stock (kube-scheduler, without
    /// features that need the controller).
    #[arg(long, env = "TESSERA_MODE", default_value = "managed")]
    pub mode: DriverMode,

    /// Object with the taint that keeps kube-scheduler from the GPUs, in mode managed: taint (the
    /// ResourceSlices) or rule (the DeviceTaintRule tessera-fence, from Kubernetes 1.37 on). No
    /// cluster autoscaler adds a node for slices with the taint. With rule, GPUs are published once
    /// the rule exists.
    #[arg(long, env = "TESSERA_FENCE", default_value = "taint")]
    pub fence: FenceKind,

    /// Seconds for which a GPU is not allocated after the mode changes from stock to managed:
    /// kube-scheduler may write an earlier decision until its binding timeout.
    #[arg(
        long,
        env = "TESSERA_STOCK_DRAIN_SECONDS",
        value_name = "SECONDS",
        default_value_t = 600
    )]
    pub stock_drain_seconds: u32,

    /// Policy for GPUs that another allocator publishes, too, such as NVIDIA's device plugin or
    /// DRA driver: refuse (do not publish them) or ignore.
    #[arg(long, env = "TESSERA_OTHER_ALLOCATORS", default_value = "refuse")]
    pub other_allocators: OtherAllocatorPolicy,

    /// Extended resource, such as example.com/gpu, by which a device plugin of this cluster hands
    /// out GPUs under a name of its own; may be repeated. The names of common plugins are known.
    #[arg(
        long = "other-resource",
        env = "TESSERA_OTHER_RESOURCE",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub other_resources: Vec<ExtendedResourceName>,

    /// Address of /metrics and /healthz; empty disables both.
    #[arg(long, env = "TESSERA_METRICS_ADDRESS", default_value = "0.0.0.0:9400")]
    pub metrics_address: ListenAddress,

    /// Format of log lines. RUST_LOG sets the log level.
    #[arg(long, env = "TESSERA_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,

    /// Socket that the command `healthz` queries. Other pods cannot reach it, so their requests to
    /// --metrics-address do not fail the probes of the kubelet [default: not served].
    #[arg(long, env = "TESSERA_HEALTH_SOCKET", value_name = "PATH", global = true)]
    pub health_socket: Option<PathBuf>,

    /// Print the ResourceSlices of this node as YAML and exit; needs no cluster.
    #[arg(long)]
    pub print_slices: bool,

    /// Something else than running the driver.
    #[command(subcommand)]
    pub command: Option<DriverCommand>,
}

/// A command besides running the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::Subcommand)]
pub enum DriverCommand {
    /// Ask the running driver at --health-socket, and exit with 1 if it is not healthy.
    Healthz,
}

/// Conflicts between flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// `--memory-percent` above 100 requires `--mode managed`.
    #[error(
        "--memory-percent {} needs --mode managed: kube-scheduler does not know which claims may be oversubscribed",
        .0.percent()
    )]
    OversubscribedStock(MemoryRatio),
    /// `--mps` requires `--mode managed`.
    #[error(
        "--mps needs --mode managed: kube-scheduler would allocate one GPU to claims with different sharing modes"
    )]
    MpsStock,
}

impl DriverArgs {
    /// Checks conflicts between flags.
    ///
    /// # Errors
    /// [`ArgsError`].
    pub fn check(&self) -> Result<(), ArgsError> {
        match self.mode {
            DriverMode::Stock if self.memory_percent.is_oversubscribed() => {
                Err(ArgsError::OversubscribedStock(self.memory_percent))
            }
            DriverMode::Stock if self.mps => Err(ArgsError::MpsStock),
            DriverMode::Stock | DriverMode::Managed => Ok(()),
        }
    }
}

fn memory_percent(text: &str) -> Result<MemoryRatio, String> {
    let percent = text.parse().ok().and_then(MemoryRatio::from_percent);
    percent.ok_or_else(|| {
        format!("not a whole number of percent from 100 to {}", MemoryRatio::MAX_PERCENT)
    })
}

fn cores_percent(text: &str) -> Result<CoresRatio, String> {
    let percent = text.parse().ok().and_then(CoresRatio::from_percent);
    percent.ok_or_else(|| {
        format!("not a whole number of percent from 100 to {}", CoresRatio::MAX_PERCENT)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_consistent() {
        use clap::CommandFactory;
        DriverArgs::command().debug_assert();
    }

    #[test]
    fn accepts_memory_percent_from_100_to_800() {
        let parse = |text: &str| {
            DriverArgs::try_parse_from(["driver", "--node-name", "n", "--memory-percent", text])
        };
        for (text, percent) in [("100", 100), ("150", 150), ("800", 800)] {
            assert_eq!(parse(text).expect(text).memory_percent.percent(), percent);
        }
        for text in ["", "99", "801", "200%", "1.5", "2"] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains("from 100 to 800"), "{error}");
        }
        let default = DriverArgs::try_parse_from(["driver", "--node-name", "n"]).expect("flags");
        assert_eq!(default.memory_percent, MemoryRatio::WHOLE);
    }

    #[test]
    fn oversubscription_needs_the_controller() {
        let check = |percent: &str, mode: &str| {
            let flags = ["driver", "--node-name", "n", "--memory-percent", percent, "--mode", mode];
            DriverArgs::try_parse_from(flags)
                .expect("flags")
                .check()
                .map_err(|error| error.to_string())
        };
        let error = check("200", "stock").expect_err("refused");
        assert!(error.starts_with("--memory-percent 200 needs --mode managed"), "{error}");
        assert_eq!((check("100", "stock"), check("200", "managed")), (Ok(()), Ok(())));
    }

    #[test]
    fn mps_needs_the_controller() {
        let check = |flags: &[&str]| {
            let all = ["driver", "--node-name", "n"].iter().chain(flags);
            DriverArgs::try_parse_from(all).expect("flags").check()
        };
        assert_eq!(check(&["--mps", "--mode", "stock"]), Err(ArgsError::MpsStock));
        assert_eq!((check(&["--mps"]), check(&["--mode", "stock"])), (Ok(()), Ok(())));
    }

    #[test]
    fn excludes_gpus_by_uuid_only() {
        let parse = |gpu: &str| {
            DriverArgs::try_parse_from(["driver", "--node-name", "n", "--exclude-gpu", gpu])
        };
        let args = parse("GPU-1F0C2D3E-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID");
        assert_eq!(args.exclude_gpus[0].as_str(), "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77");
        assert!(parse("0").expect_err("an index").to_string().contains("UUID"));
    }

    #[test]
    fn empty_metrics_address_disables_metrics() {
        let args =
            DriverArgs::try_parse_from(["driver", "--node-name", "n", "--metrics-address", ""])
                .expect("flags");
        assert_eq!(args.metrics_address, ListenAddress(None));
    }
}
