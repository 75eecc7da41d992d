//! A client of MPS: what a process is whose variables lead to a control daemon that answers, from
//! `cuInit` on.
//!
//! As NVIDIA's documentation says of clients since Volta (docs.nvidia.com/deploy/mps): they see as
//! many multiprocessors as they may use, and get no more memory than their limit. That their
//! kernels run beside others' is not modelled.

use std::env;
use std::path::Path;
use std::sync::OnceLock;

use tessera_fake_mps_control::client::Client;
use tessera_fake_mps_control::environment::PIPE_DIRECTORY;
use tessera_fake_mps_control::protocol::Greeting;
use tessera_fake_world::{Gpu, Machine};

/// What this process is, once it has called `cuInit`.
static JOINED: OnceLock<Option<Joined>> = OnceLock::new();

/// The limits of a client.
pub(crate) struct Joined {
    client: Client,
    percentage: f64,
    memory_bytes: Option<u64>,
}

impl Joined {
    /// How many of so many multiprocessors it may use.
    pub(crate) fn part_of(&self, multiprocessors: u32) -> u32 {
        let part = (f64::from(multiprocessors) * self.percentage / 100.0).ceil();
        (part as u32).clamp(1, multiprocessors)
    }

    /// The most bytes that it gets.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        self.memory_bytes
    }
}

/// Becomes a client, where there is a daemon. Without one the process goes on by itself, as with
/// the real driver.
pub(crate) fn join() {
    JOINED.get_or_init(|| {
        let pipe = env::var_os(PIPE_DIRECTORY)?;
        let percentage =
            variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").and_then(|text| text.parse().ok());
        let percentage =
            percentage.filter(|percent| (0.0..=100.0).contains(percent) && *percent > 0.0);
        let memory = variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
        let greeting = Greeting {
            pid: std::process::id(),
            // SAFETY: cannot fail and touches nothing.
            uid: unsafe { libc::getuid() },
            percentage: percentage.unwrap_or(100.0),
            memory: memory.clone().unwrap_or_else(|| "none".to_owned()),
            priority: variable("CUDA_MPS_CLIENT_PRIORITY")
                .and_then(|text| text.parse().ok())
                .unwrap_or(0),
        };
        let client = Client::connect(Path::new(&pipe), &greeting).ok()?;
        let memory_bytes = memory.as_deref().and_then(of_first_device);
        Some(Joined { client, percentage: greeting.percentage, memory_bytes })
    });
}

/// What this process is on that GPU; `None` where it goes by itself.
pub(crate) fn on(gpu: &Gpu) -> Option<&'static Joined> {
    JOINED.get()?.as_ref().filter(|joined| joined.client.device() == gpu.uuid)
}

/// The same on a GPU of the machine.
pub(crate) fn on_gpu_of(machine: &Machine, gpu: usize) -> Option<&'static Joined> {
    on(&machine.world().gpus[gpu])
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|text| !text.is_empty())
}

/// Bytes of device 0 in `0=1G,1=512M`.
fn of_first_device(limits: &str) -> Option<u64> {
    let limit = limits.split(',').find_map(|limit| limit.strip_prefix("0="))?;
    let shift = match limit.as_bytes().last()? {
        b'K' => 10,
        b'M' => 20,
        b'G' => 30,
        _ => return limit.parse().ok(),
    };
    limit[..limit.len() - 1].parse::<u64>().ok()?.checked_shl(shift)
}
