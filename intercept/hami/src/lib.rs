//! HAMi-core's environment variables, parsed as HAMi-core parses them.
//!
//! ```text
//!  CUDA_DEVICE_MEMORY_LIMIT[_<i>]   bytes; k, m, g at the end         memory(i)
//!  CUDA_DEVICE_SM_LIMIT[_<i>]       percent                           cores(i)
//!  GPU_CORE_UTILIZATION_POLICY      `disable`: no compute is limited  cores(i)
//!  CUDA_VISIBLE_DEVICES             which GPU an ordinal means        gpu_of(ordinal)
//!  CUDA_DEVICE_MEMORY_SHARED_CACHE  where processes share a ledger    cache()
//!  CUDA_TASK_PRIORITY               0 is the highest                  priority()
//!  CUDA_OVERSUBSCRIBE               memory may spill to the host      oversubscribes()
//! ```
//!
//! A number is what C's `strtoul` makes of the text with base 0, times the unit that its last
//! letter says; a number for one GPU goes before the general one; nothing, or 0, is no limit. In
//! one thing it is stricter than HAMi-core, which takes anything else for no limit, or for one of
//! 2^64 bytes: what is no number, or below 0, is a limit of 0 bytes. Variables that choose logs,
//! and those that HAMi-core reads and does not use, change nothing.
//!
//! [`Region`] is the file that HAMi's monitor reads.
//!
//! Pure: it asks for variables through a function, and takes no memory.
#![no_std]
#![forbid(unsafe_code)]

mod name;
mod number;
mod region;

use name::Name;
use number::{Number, number};
pub use region::{LAUNCHED, LIMITS_APPLY, PROCESSES, Process, REGION_LEN, Region};

/// GPUs that HAMi has variables for.
pub const GPUS: usize = 16;

/// Default path of the file that the processes of a container share.
pub const DEFAULT_CACHE: &[u8] = b"/tmp/cudevshr.cache";

/// A GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryVariable {
    /// All of it.
    Unlimited,
    /// This many bytes.
    Bytes(u64),
}

/// The variables of a process. The function answers the value of one by its name.
#[derive(Debug, Clone, Copy)]
pub struct Variables<F>(pub F);

impl<'v, F: Fn(&[u8]) -> Option<&'v [u8]>> Variables<F> {
    /// Returns the memory of a GPU, by its index among those that the container has.
    pub fn memory(&self, gpu: usize) -> MemoryVariable {
        match self.limit(b"CUDA_DEVICE_MEMORY_LIMIT", gpu) {
            Number::None => MemoryVariable::Unlimited,
            Number::Of(bytes) => MemoryVariable::Bytes(bytes),
            Number::Senseless => MemoryVariable::Bytes(0),
        }
    }

    /// The least memory that any GPU has: for one whose index is not known.
    pub fn least_memory(&self) -> MemoryVariable {
        (0..GPUS).map(|gpu| self.memory(gpu)).fold(
            MemoryVariable::Unlimited,
            |least, memory| match (least, memory) {
                (MemoryVariable::Unlimited, other) | (other, MemoryVariable::Unlimited) => other,
                (MemoryVariable::Bytes(one), MemoryVariable::Bytes(other)) => {
                    MemoryVariable::Bytes(one.min(other))
                }
            },
        )
    }

    /// Returns the percent of a GPU's compute, 1 to 99; `None`: not limited. An invalid value is 1
    /// percent.
    pub fn cores(&self, gpu: usize) -> Option<u32> {
        let policy = (self.0)(b"GPU_CORE_UTILIZATION_POLICY").unwrap_or_default();
        if matches!(policy, b"disable" | b"DISABLE") {
            return None;
        }
        match self.limit(b"CUDA_DEVICE_SM_LIMIT", gpu) {
            Number::None => None,
            Number::Of(percent) => u32::try_from(percent).ok().filter(|percent| *percent < 100),
            Number::Senseless => Some(1),
        }
    }

    /// The least that any GPU has: for one whose index is not known.
    pub fn least_cores(&self) -> Option<u32> {
        (0..GPUS).filter_map(|gpu| self.cores(gpu)).min()
    }

    /// Returns true if the monitor's word that the container is alone on its GPUs does not lift
    /// limits of compute.
    pub fn always_limits_compute(&self) -> bool {
        matches!((self.0)(b"GPU_CORE_UTILIZATION_POLICY"), Some(b"force" | b"FORCE"))
    }

    /// Returns the container's priority among those of its GPUs; 0 is the highest. Default: 1, also
    /// for an invalid value, which HAMi-core takes for 0.
    pub fn priority(&self) -> i32 {
        let text = (self.0)(b"CUDA_TASK_PRIORITY").and_then(|text| core::str::from_utf8(text).ok());
        text.and_then(|text| text.trim().parse().ok()).unwrap_or(1)
    }

    /// Returns true if memory may spill to the host.
    pub fn oversubscribes(&self) -> bool {
        matches!((self.0)(b"CUDA_OVERSUBSCRIBE"), Some(b"true" | b"1"))
    }

    /// The index of the GPU that CUDA calls by an ordinal: `CUDA_VISIBLE_DEVICES` reorders, where
    /// it is a list of numbers.
    pub fn gpu_of(&self, ordinal: usize) -> usize {
        let Some(list) = (self.0)(b"CUDA_VISIBLE_DEVICES") else { return ordinal };
        let named = list.split(|byte| *byte == b',').nth(ordinal);
        let index =
            named.and_then(|text| core::str::from_utf8(text.trim_ascii()).ok()?.parse().ok());
        index.unwrap_or(ordinal)
    }

    /// The path that ledgers' names begin with.
    pub fn cache(&self) -> &'v [u8] {
        (self.0)(b"CUDA_DEVICE_MEMORY_SHARED_CACHE")
            .filter(|path| !path.is_empty())
            .unwrap_or(DEFAULT_CACHE)
    }

    /// One GPU's own limit; the general one where it has none.
    fn limit(&self, name: &[u8], gpu: usize) -> Number {
        let general = || (self.0)(name).map_or(Number::None, number);
        let own = (gpu < GPUS).then(|| (self.0)(Name::of_gpu(name, gpu).as_bytes())).flatten();
        match own.map_or(Number::None, number) {
            Number::None => general(),
            own => own,
        }
    }
}
