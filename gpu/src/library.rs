//! Interface between the driver and the GPU hardware.

use std::{collections::BTreeMap, time::Duration};

use nvml_wrapper::error::NvmlError;
use tessera_api::gpu::{Health, Inventory};
use tessera_api::names::GpuUuid;

use crate::recovery::RecoveryAction;
use crate::xid::{HealthImpact, Xid};

/// Access to a node's GPUs. All calls block. They take microseconds to milliseconds, except
/// [`HealthWatch::wait`], and may be made from any thread.
pub trait GpuLibrary: Send + Sync {
    /// Returns all GPUs of the node. Each call reads the current state, and loads the library if it
    /// could not be loaded before.
    ///
    /// # Errors
    /// Returns an error if there is no usable library or kernel driver. An unusable GPU is not an
    /// error: it is listed in [`Inventory::unpublished`] with the reason. A GPU that an earlier
    /// call found and that is gone is listed there as lost.
    fn inventory(&self) -> Result<Inventory, LibraryError>;

    /// Returns true if GPUs were bound to the kernel driver, or unbound from it, since the library
    /// was loaded. The next [`inventory`](Self::inventory) loads it again and finds them, once all
    /// [watches](Self::watch) are dropped and no other call is under way.
    fn is_outdated(&self) -> bool;

    /// Returns the current memory usage of a GPU.
    ///
    /// # Errors
    /// The GPU is lost or unknown, or the library fails.
    fn memory(&self, gpu: &GpuUuid) -> Result<GpuMemory, LibraryError>;

    /// Returns the processes that hold memory on a GPU, for compute or graphics, sorted by PID. The
    /// PIDs are those of the caller's PID namespace.
    ///
    /// # Errors
    /// The GPU is lost or unknown, or the library fails.
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, LibraryError>;

    /// Returns in how much of the time since the sample `since_us` the GPU ran work of each
    /// process; 0 is the oldest sample that NVML has. `None` if the GPU does not report it, as
    /// in MIG mode. The PIDs are those of the caller's PID namespace.
    ///
    /// # Errors
    /// The GPU is lost or unknown, or the library fails.
    fn utilization(
        &self,
        gpu: &GpuUuid,
        since_us: u64,
    ) -> Result<Option<ProcessUtilization>, LibraryError>;

    /// Returns in which part of NVML's last sample period (a sixth of a second to a second) the GPU
    /// ran any kernel, in percent. `None` if the GPU does not report it, as in MIG mode.
    ///
    /// # Errors
    /// The GPU is lost or unknown, or the library fails.
    fn busy_percent(&self, gpu: &GpuUuid) -> Result<Option<u8>, LibraryError>;

    /// Returns the recovery action of NVIDIA's driver, or `None` if the driver does not support the
    /// query.
    ///
    /// # Errors
    /// The GPU is lost or unknown, or the library fails.
    fn recovery_action(&self, gpu: &GpuUuid) -> Result<Option<RecoveryAction>, LibraryError>;

    /// Starts to watch the health of these GPUs. Earlier events are not reported, but a GPU that is
    /// already lost is.
    ///
    /// # Errors
    /// There is no usable library or kernel driver.
    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn HealthWatch>, LibraryError>;
}

/// Watches the health of some GPUs.
pub trait HealthWatch: Send {
    /// Waits up to `timeout` for an event and returns all pending events, or none after the
    /// timeout. It also polls the presence of each GPU, because not every loss creates an
    /// event.
    ///
    /// # Errors
    /// The library fails. The GPUs stay watched; call again after a pause.
    fn wait(&mut self, timeout: Duration) -> Result<Vec<HealthEvent>, LibraryError>;
}

/// A health event of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthEvent {
    /// UUID of the GPU.
    pub gpu: GpuUuid,
    /// Kind of the event.
    pub kind: HealthEventKind,
}

/// Kind of a health event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthEventKind {
    /// The GPU fell off the bus, or does not answer.
    Lost,
    /// A lost GPU answers again.
    Back,
    /// The kernel driver reported an XID.
    Xid(Xid),
    /// An uncorrectable ECC memory error occurred.
    DoubleBitEcc,
}

impl HealthEventKind {
    /// Returns true if a [recovery action](RecoveryAction) of "none" after this event means that
    /// the GPU is usable.
    pub fn sets_recovery_action(self) -> bool {
        match self {
            Self::Xid(xid) => xid.sets_recovery_action(),
            // This is the event of XID 48.
            Self::DoubleBitEcc => true,
            Self::Lost | Self::Back => false,
        }
    }

    /// Returns the effect on the GPU's health, or `None` for [`HealthEventKind::Back`], which only
    /// reverts a loss.
    pub fn verdict(self) -> Option<HealthImpact> {
        match self {
            Self::Lost | Self::DoubleBitEcc => Some(HealthImpact::Unhealthy),
            Self::Xid(xid) => Some(xid.health_impact()),
            Self::Back => None,
        }
    }

    /// Returns the GPU's new health, or `None` if the event does not change it.
    pub fn health(self) -> Option<Health> {
        if self.verdict() != Some(HealthImpact::Unhealthy) {
            return None;
        }
        let (code, message) = match self {
            Self::Lost => (
                "Lost".to_owned(),
                "the GPU no longer answers; it may have fallen off the bus".to_owned(),
            ),
            Self::DoubleBitEcc => {
                ("DoubleBitEcc".to_owned(), "a memory error could not be corrected".to_owned())
            }
            Self::Xid(xid) => {
                (format!("Xid{}", xid.0), format!("XID {}: {}", xid.0, xid.description()))
            }
            Self::Back => return None,
        };
        Some(Health::Unhealthy { code, message })
    }
}

/// Memory of a GPU in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// Total memory.
    pub total: u64,
    /// Memory held by processes, without the reserve of driver and firmware.
    pub used: u64,
    /// Memory that can be allocated.
    pub free: u64,
}

/// A process that holds memory on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// PID of the process.
    pub pid: u32,
    /// Bytes; `None` if the driver does not report them.
    pub bytes: Option<u64>,
}

/// In how much of the time a GPU ran work of processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProcessUtilization {
    /// Time of the last sample in us, by which the next call continues; that of the call if there
    /// is no newer sample.
    pub last_us: u64,
    /// Time since that sample. `None` if there is no newer sample, or if its time is in the future:
    /// the clock of the node was set.
    pub age: Option<Duration>,
    /// Percent of the time, by PID. Processes without work are not listed.
    pub percent: BTreeMap<u32, u32>,
}

/// Error of the GPU library.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// No NVML library was found.
    #[error(
        "NVML library not found (searched: {searched}): install the NVIDIA driver, or set \
         --driver-root or --nvml-library"
    )]
    NotFound {
        /// Searched paths.
        searched: String,
        /// Error of the last path.
        source: NvmlError,
    },
    /// NVML was found and cannot reach the kernel driver.
    #[error(
        "cannot initialise NVML ({library}): check that the NVIDIA kernel driver is loaded and has the same version"
    )]
    Initialise {
        /// Path of the library.
        library: String,
        /// Error of NVML.
        source: NvmlError,
    },
    /// A call of NVML failed.
    #[error("NVML call {call} failed")]
    Call {
        /// Name of the function.
        call: &'static str,
        /// Error of NVML.
        source: NvmlError,
    },
    /// A call of NVML on a GPU failed.
    #[error("NVML call {call} failed on {gpu}")]
    GpuCall {
        /// UUID of the GPU.
        gpu: GpuUuid,
        /// Name of the function.
        call: &'static str,
        /// Error of NVML.
        source: NvmlError,
    },
    /// The GPU fell off the bus, or no GPU has that UUID.
    #[error("{gpu} is lost or does not exist on this node")]
    Lost {
        /// UUID of the GPU.
        gpu: GpuUuid,
    },
}
