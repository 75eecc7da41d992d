//! The seam between the driver and the hardware.

use std::time::Duration;

use nvml_wrapper::error::NvmlError;
use tessera_api::gpu::{Health, Inventory};
use tessera_api::names::GpuUuid;

use crate::recovery::RecoveryAction;
use crate::xid::{Verdict, Xid};

/// What the driver asks of a node's GPUs. All calls block; they take microseconds to milliseconds,
/// but for [`HealthWatch::wait`], and may be made from any thread.
pub trait GpuLibrary: Send + Sync {
    /// Looks at all GPUs. Called again, it sees what has changed since; where the library could not
    /// be loaded before, it tries again.
    ///
    /// # Errors
    /// There is no usable library or kernel driver. A GPU that cannot be used is no error: it is
    /// among [`Inventory::unpublished`], with the reason. A GPU that an earlier call saw and
    /// that is gone is there too, as lost.
    fn inventory(&self) -> Result<Inventory, LibraryError>;

    /// Memory of a GPU now.
    ///
    /// # Errors
    /// The GPU is lost or unknown, or the library fails.
    fn memory(&self, gpu: &GpuUuid) -> Result<GpuMemory, LibraryError>;

    /// Processes that hold memory on a GPU now, for computing or for graphics, in order of their
    /// ids, which are as this process's PID namespace has them.
    ///
    /// # Errors
    /// The GPU is lost or unknown, or the library fails.
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, LibraryError>;

    /// What NVIDIA's driver asks for before new processes may use the GPU; `None` where the driver
    /// does not know that question.
    ///
    /// # Errors
    /// The GPU is lost or unknown, or the library fails.
    fn recovery_action(&self, gpu: &GpuUuid) -> Result<Option<RecoveryAction>, LibraryError>;

    /// Starts to watch the health of these GPUs. Events from before are not reported; a GPU that is
    /// lost already is.
    ///
    /// # Errors
    /// There is no usable library or kernel driver.
    fn watch(&self, gpus: &[GpuUuid]) -> Result<Box<dyn HealthWatch>, LibraryError>;
}

/// Watches the health of some GPUs.
pub trait HealthWatch: Send {
    /// Waits until something happens to one of them, at most for so long, and returns everything
    /// that has; nothing if nothing has. Besides waiting for events it asks every GPU whether
    /// it is still there: not every loss is announced.
    ///
    /// # Errors
    /// The library fails altogether. What was watched stays watched; call again after a pause.
    fn wait(&mut self, timeout: Duration) -> Result<Vec<HealthEvent>, LibraryError>;
}

/// Something happened to a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthEvent {
    /// The GPU.
    pub gpu: GpuUuid,
    /// What happened.
    pub kind: HealthEventKind,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthEventKind {
    /// It fell off the bus, or does not answer any more.
    Lost,
    /// It was lost and answers again.
    Back,
    /// The kernel driver reported an XID.
    Xid(Xid),
    /// A memory error that ECC could not correct.
    DoubleBitEcc,
}

impl HealthEventKind {
    /// Whether a [recovery action](RecoveryAction) of "none" after it means that none is needed.
    pub fn sets_recovery_action(self) -> bool {
        match self {
            Self::Xid(xid) => xid.sets_recovery_action(),
            // The event of XID 48.
            Self::DoubleBitEcc => true,
            Self::Lost | Self::Back => false,
        }
    }

    /// What it means for the GPU; `None` for [`HealthEventKind::Back`], which undoes a loss and
    /// nothing else.
    pub fn verdict(self) -> Option<Verdict> {
        match self {
            Self::Lost | Self::DoubleBitEcc => Some(Verdict::Unhealthy),
            Self::Xid(xid) => Some(xid.verdict()),
            Self::Back => None,
        }
    }

    /// The health that the GPU has after it; `None` where its health is what it was before.
    pub fn health(self) -> Option<Health> {
        if self.verdict() != Some(Verdict::Unhealthy) {
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
    /// All of it.
    pub total: u64,
    /// What processes hold; without what driver and firmware keep.
    pub used: u64,
    /// What can be had.
    pub free: u64,
}

/// A process that holds memory on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its id.
    pub pid: u32,
    /// Bytes; none where the driver does not say.
    pub bytes: Option<u64>,
}

/// Why the GPUs cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// There is no NVML library.
    #[error(
        "no NVML library was found (looked at: {searched}): install the NVIDIA driver, or say where it is with \
         --driver-root or --nvml-library"
    )]
    NotFound {
        /// The places.
        searched: String,
        /// Why the last of them did not do.
        source: NvmlError,
    },
    /// NVML is there and cannot reach the kernel driver.
    #[error(
        "NVML ({library}) cannot be initialised: is the NVIDIA kernel driver loaded, and of the same version?"
    )]
    Initialise {
        /// The library.
        library: String,
        /// What NVML says.
        source: NvmlError,
    },
    /// A call failed.
    #[error("NVML's {call} failed")]
    Call {
        /// The call.
        call: &'static str,
        /// What NVML says.
        source: NvmlError,
    },
    /// A call on a GPU failed.
    #[error("NVML's {call} failed on {gpu}")]
    GpuCall {
        /// The GPU.
        gpu: GpuUuid,
        /// The call.
        call: &'static str,
        /// What NVML says.
        source: NvmlError,
    },
    /// The GPU fell off the bus, or there is none with that UUID.
    #[error("{gpu} is lost, or not in this machine")]
    Lost {
        /// The GPU.
        gpu: GpuUuid,
    },
}
