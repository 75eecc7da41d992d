//! Clients of MPS. A process is a client from `cuInit` on if its variables lead to a control daemon
//! that answers.
//!
//! As in NVIDIA's documentation for clients since Volta (docs.nvidia.com/deploy/mps), a client sees
//! as many multiprocessors as it may use, and gets no more memory than its limit. Concurrent
//! execution of kernels is not modelled.

use std::env;
use std::path::Path;
use std::sync::OnceLock;

use tessera_fake_mps_control::client::Client;
use tessera_fake_mps_control::environment::PIPE_DIRECTORY;
use tessera_fake_mps_control::protocol::ClientRequest;
use tessera_fake_world::{Gpu, Machine};

/// Client of this process, set by `cuInit`.
static CLIENT: OnceLock<Option<MpsClient>> = OnceLock::new();

/// A client and its limits.
pub(crate) struct MpsClient {
    connection: Client,
    percentage: f64,
    memory_bytes: Option<u64>,
}

impl MpsClient {
    /// Returns the share of `multiprocessors` that the client may use.
    pub(crate) fn multiprocessors_of(&self, multiprocessors: u32) -> u32 {
        let part = (f64::from(multiprocessors) * self.percentage / 100.0).ceil();
        (part as u32).clamp(1, multiprocessors)
    }

    /// Returns the memory limit in bytes.
    pub(crate) fn memory_limit(&self) -> Option<u64> {
        self.memory_bytes
    }
}

/// Registers this process as a client if a daemon runs. Without one the process uses the GPU
/// directly, as with the real driver.
pub(crate) fn connect() {
    CLIENT.get_or_init(|| {
        let pipe = env::var_os(PIPE_DIRECTORY)?;
        let percentage =
            variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").and_then(|text| text.parse().ok());
        let percentage =
            percentage.filter(|percent| (0.0..=100.0).contains(percent) && *percent > 0.0);
        let memory = variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
        let request = ClientRequest {
            pid: std::process::id(),
            // SAFETY: `getuid` has no preconditions.
            uid: unsafe { libc::getuid() },
            percentage: percentage.unwrap_or(100.0),
            memory: memory.clone().unwrap_or_else(|| "none".to_owned()),
            priority: variable("CUDA_MPS_CLIENT_PRIORITY")
                .and_then(|text| text.parse().ok())
                .unwrap_or(0),
        };
        let connection = Client::connect(Path::new(&pipe), &request).ok()?;
        let memory_bytes = memory.as_deref().and_then(first_device_limit);
        Some(MpsClient { connection, percentage: request.percentage, memory_bytes })
    });
}

/// Returns this process's client on `gpu`; `None` if it uses the GPU directly.
pub(crate) fn client_on(gpu: &Gpu) -> Option<&'static MpsClient> {
    CLIENT.get()?.as_ref().filter(|client| client.connection.device() == gpu.uuid)
}

/// Returns this process's client on a GPU of the machine.
pub(crate) fn client_on_index(machine: &Machine, gpu: usize) -> Option<&'static MpsClient> {
    client_on(&machine.world().gpus[gpu])
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|text| !text.is_empty())
}

/// Returns the bytes of device 0 in limits such as `0=1G,1=512M`.
fn first_device_limit(limits: &str) -> Option<u64> {
    let limit = limits.split(',').find_map(|limit| limit.strip_prefix("0="))?;
    let shift = match limit.as_bytes().last()? {
        b'K' => 10,
        b'M' => 20,
        b'G' => 30,
        _ => return limit.parse().ok(),
    };
    limit[..limit.len() - 1].parse::<u64>().ok()?.checked_shl(shift)
}
