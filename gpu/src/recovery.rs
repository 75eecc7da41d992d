//! What NVIDIA's driver says has to be done before a GPU can be used again.
//!
//! The field `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION` of `nvmlDeviceGetFieldValues`, in drivers since
//! 565. "None" means by NVIDIA's own words that the GPU can be used again at once by a new process
//! (<https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html>). A row remapping that is
//! pending is not an action: applications go on, and new ones may be started.

use std::fmt;

/// `nvmlDeviceGpuRecoveryAction_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAction {
    /// Nothing: new processes may use the GPU.
    None,
    /// All its processes have to end, then it has to be reset.
    GpuReset,
    /// The node has to be booted again.
    NodeReboot,
    /// Processes that use peer-to-peer have to end; then the driver says what is next.
    DrainP2p,
    /// It works on with less; no new processes, and a reset when those that run have ended.
    DrainAndReset,
    /// One that was invented after this was written.
    Other(u32),
}

impl RecoveryAction {
    /// By NVML's number.
    pub const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::None,
            1 => Self::GpuReset,
            2 => Self::NodeReboot,
            3 => Self::DrainP2p,
            4 => Self::DrainAndReset,
            other => Self::Other(other),
        }
    }

    /// One CamelCase word for machines.
    pub fn code(self) -> String {
        match self {
            Self::None => "None".to_owned(),
            Self::GpuReset => "GpuReset".to_owned(),
            Self::NodeReboot => "NodeReboot".to_owned(),
            Self::DrainP2p => "DrainP2P".to_owned(),
            Self::DrainAndReset => "DrainAndReset".to_owned(),
            Self::Other(number) => format!("RecoveryAction{number}"),
        }
    }
}

impl fmt::Display for RecoveryAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("nothing"),
            Self::GpuReset => f.write_str("a reset of the GPU (nvidia-smi --gpu-reset)"),
            Self::NodeReboot => f.write_str("a reboot of the node"),
            Self::DrainP2p => f.write_str("an end of all processes that use peer-to-peer"),
            Self::DrainAndReset => f.write_str("a reset of the GPU once its processes have ended"),
            Self::Other(number) => write!(f, "the recovery action {number}, see nvidia-smi -q"),
        }
    }
}
