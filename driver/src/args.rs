//! Flags. Each is also an environment variable.

use std::path::PathBuf;

use clap::Parser;
use tessera_api::{
    names::{GpuUuid, NodeName},
    slice::{DeviceOrder, MemoryRatio},
};
use tessera_runtime::{address::Address, log::LogFormat};

use crate::{
    context_memory::ContextMemory, intercept::Intercept, mode::Mode,
    other_allocators::OnOtherAllocator,
};

/// Shares the GPUs of one node: publishes them as ResourceSlices and prepares the claims that are
/// allocated here.
#[derive(Clone, Debug, Parser)]
#[command(name = "tessera-driver", version)]
pub struct Args {
    /// Name of the Node that this is.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: NodeName,

    /// How to reach the API server; otherwise the file that KUBECONFIG names or ~/.kube/config,
    /// then the pod's service account.
    #[arg(long, env = "TESSERA_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// The kubelet's root directory.
    #[arg(long, env = "TESSERA_KUBELET_ROOT", default_value = "/var/lib/kubelet")]
    pub kubelet_root: PathBuf,

    /// UID of the pod that this is, for sockets of its own: during a rolling update the old and
    /// the new pod serve side by side.
    #[arg(long, env = "POD_UID")]
    pub pod_uid: Option<String>,

    /// Where the container runtime reads CDI specs.
    #[arg(long, env = "TESSERA_CDI_DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,

    /// Where the driver keeps what is prepared; on a tmpfs, at the same path on the host.
    #[arg(long, env = "TESSERA_STATE_DIR", default_value = "/run/tessera")]
    pub state_dir: PathBuf,

    /// Root of the NVIDIA driver's files, as this process sees it.
    #[arg(long, env = "TESSERA_DRIVER_ROOT", default_value = "/")]
    pub driver_root: PathBuf,

    /// The same root as the container runtime on the host sees it [default: the value of
    /// --driver-root].
    #[arg(long, env = "TESSERA_DRIVER_ROOT_HOST")]
    pub driver_root_host: Option<PathBuf>,

    /// NVML itself [default: searched for under --driver-root, then by the dynamic loader].
    #[arg(long, env = "TESSERA_NVML_LIBRARY")]
    pub nvml_library: Option<PathBuf>,

    /// Where sysfs is mounted.
    #[arg(long, env = "TESSERA_SYSFS_ROOT", default_value = "/sys")]
    pub sysfs_root: PathBuf,

    /// The interceptor library that containers are to get.
    #[arg(
        long,
        env = "TESSERA_INTERCEPT_LIBRARY",
        default_value = "/usr/local/lib/tessera/libtessera_intercept.so"
    )]
    pub intercept_library: PathBuf,

    /// Where the interceptor stands in containers: preload, in every program; proxy, in the place
    /// of libcuda and NVML; both. Its other libraries (libtessera_intercept_cuda.so and
    /// _nvml.so) lie beside --intercept-library. Claims that are prepared already
    /// keep what they have.
    #[arg(long, env = "TESSERA_INTERCEPT", default_value = "preload")]
    pub intercept: Intercept,

    /// What each CUDA context is charged to the share whose process begins it, as 512Mi: the CUDA
    /// driver takes that before a program asks for any, and the GPU has to have it. `make
    /// bench-gpu` measures it. 0 charges nothing: leave as much of the GPU unshared then. Claims
    /// that are prepared already keep what they have.
    #[arg(long, env = "TESSERA_CONTEXT_MEMORY", value_name = "QUANTITY", default_value_t)]
    pub context_memory: ContextMemory,

    /// What is published of each GPU's memory, in percent of what it has, 100 to 800. Above 100
    /// only claims with `memory.oversubscribe: true` get GPUs of this node, and their memory
    /// may lie on the host; not in mode stock. What is prepared already stays, and a GPU is
    /// published as it is while somebody has a share of it that may not spill.
    #[arg(long, env = "TESSERA_MEMORY_PERCENT", value_name = "PERCENT", default_value = "100", value_parser = memory_percent)]
    pub memory_percent: MemoryRatio,

    /// Whether claims can share a GPU by MPS (`sharing: MPS` in their GpuConfig): its control
    /// daemons are run by tessera-mps, which must be on this node with the same --state-dir.
    /// Not in mode stock. Claims that are prepared already keep what they have.
    #[arg(long, env = "TESSERA_MPS")]
    pub mps: bool,

    /// UUID of a GPU that is not to be shared; may be repeated.
    #[arg(
        long = "exclude-gpu",
        env = "TESSERA_EXCLUDE_GPU",
        value_name = "UUID",
        value_delimiter = ','
    )]
    pub exclude_gpus: Vec<GpuUuid>,

    /// In which order the slices list the GPUs: index, free-last, free-first or clique. An
    /// allocator that takes the first that fits packs, spreads or keeps together thereby.
    #[arg(long, env = "TESSERA_DEVICE_ORDER", default_value = "index")]
    pub device_order: DeviceOrder,

    /// Who allocates the GPUs: managed, tessera-controller; stock, kube-scheduler, without what
    /// needs the controller.
    #[arg(long, env = "TESSERA_MODE", default_value = "managed")]
    pub mode: Mode,

    /// Seconds for which a GPU is nobody's when the mode changes from stock to managed: what
    /// kube-scheduler has begun to allocate may be written as late as its binding timeout.
    #[arg(
        long,
        env = "TESSERA_STOCK_DRAIN_SECONDS",
        value_name = "SECONDS",
        default_value_t = 600
    )]
    pub stock_drain_seconds: u32,

    /// What to do with GPUs that another allocator hands out too, such as NVIDIA's device plugin
    /// or DRA driver: refuse to publish them, or ignore it.
    #[arg(long, env = "TESSERA_OTHER_ALLOCATORS", default_value = "refuse")]
    pub other_allocators: OnOtherAllocator,

    /// Address of /metrics and /healthz; empty: none.
    #[arg(long, env = "TESSERA_METRICS_ADDRESS", default_value = "0.0.0.0:9400")]
    pub metrics_address: Address,

    /// How log lines are written. What is logged is set by RUST_LOG.
    #[arg(long, env = "TESSERA_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,

    /// Prints the ResourceSlices of this machine as YAML and exits; needs no cluster.
    #[arg(long)]
    pub print_slices: bool,
}

/// Flags that cannot be together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// Nobody would keep claims that must not spill from memory that is not there.
    #[error(
        "--memory-percent {} needs --mode managed: kube-scheduler does not know which claims may have memory that is not all there",
        .0.percent()
    )]
    OversubscribedStock(MemoryRatio),
    /// Nobody would keep claims apart that share in different ways.
    #[error(
        "--mps needs --mode managed: kube-scheduler would put claims on one GPU that share it in different ways"
    )]
    MpsStock,
}

impl Args {
    /// Checks what one flag alone cannot tell.
    ///
    /// # Errors
    /// [`ArgsError`].
    pub fn check(&self) -> Result<(), ArgsError> {
        match self.mode {
            Mode::Stock if self.memory_percent.is_oversubscribed() => {
                Err(ArgsError::OversubscribedStock(self.memory_percent))
            }
            Mode::Stock if self.mps => Err(ArgsError::MpsStock),
            Mode::Stock | Mode::Managed => Ok(()),
        }
    }
}

fn memory_percent(text: &str) -> Result<MemoryRatio, String> {
    let percent = text.parse().ok().and_then(MemoryRatio::from_percent);
    percent.ok_or_else(|| {
        format!("write a whole number of percent from 100 to {}", MemoryRatio::MAX_PERCENT)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn memory_is_published_at_100_to_800_percent() {
        let parse = |text: &str| {
            Args::try_parse_from(["driver", "--node-name", "n", "--memory-percent", text])
        };
        for (text, percent) in [("100", 100), ("150", 150), ("800", 800)] {
            assert_eq!(parse(text).expect(text).memory_percent.percent(), percent);
        }
        for text in ["", "99", "801", "200%", "1.5", "2"] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains("from 100 to 800"), "{error}");
        }
        let default = Args::try_parse_from(["driver", "--node-name", "n"]).expect("flags");
        assert_eq!(default.memory_percent, MemoryRatio::WHOLE);
    }

    #[test]
    fn more_memory_than_there_is_needs_the_controller() {
        let check = |percent: &str, mode: &str| {
            let flags = ["driver", "--node-name", "n", "--memory-percent", percent, "--mode", mode];
            Args::try_parse_from(flags).expect("flags").check().map_err(|error| error.to_string())
        };
        let error = check("200", "stock").expect_err("refused");
        assert!(error.starts_with("--memory-percent 200 needs --mode managed"), "{error}");
        assert_eq!((check("100", "stock"), check("200", "managed")), (Ok(()), Ok(())));
    }

    #[test]
    fn mps_needs_the_controller() {
        let check = |flags: &[&str]| {
            let all = ["driver", "--node-name", "n"].iter().chain(flags);
            Args::try_parse_from(all).expect("flags").check()
        };
        assert_eq!(check(&["--mps", "--mode", "stock"]), Err(ArgsError::MpsStock));
        assert_eq!((check(&["--mps"]), check(&["--mode", "stock"])), (Ok(()), Ok(())));
    }

    #[test]
    fn gpus_are_excluded_by_uuid_only() {
        let parse =
            |gpu: &str| Args::try_parse_from(["driver", "--node-name", "n", "--exclude-gpu", gpu]);
        let args = parse("GPU-1F0C2D3E-9a41-7c3b-8e55-0d6f2b1a4c77").expect("a UUID");
        assert_eq!(args.exclude_gpus[0].as_str(), "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77");
        assert!(parse("0").expect_err("an index").to_string().contains("UUID"));
    }

    #[test]
    fn an_empty_metrics_address_turns_them_off() {
        let args = Args::try_parse_from(["driver", "--node-name", "n", "--metrics-address", ""])
            .expect("flags");
        assert_eq!(args.metrics_address, Address(None));
    }
}
