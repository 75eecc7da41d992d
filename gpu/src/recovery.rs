//! NVIDIA's recovery action: the step that is needed before a GPU can be used again.
//!
//! The field `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION` of `nvmlDeviceGetFieldValues`, in drivers since
//! 565. "None" means, according to NVIDIA, that a new process can use the GPU at once
//! (<https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html>). A
//! pending row remapping is not an action: applications continue, and new ones may be started.

use std::fmt;

/// A value of `nvmlDeviceGpuRecoveryAction_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAction {
    /// No action: new processes may use the GPU.
    None,
    /// All processes of the GPU must exit, then it must be reset.
    GpuReset,
    /// The node must be rebooted.
    NodeReboot,
    /// Processes that use peer-to-peer must exit; then the driver reports the next action.
    DrainP2p,
    /// The GPU continues with reduced capacity. It takes no new processes and must be reset after
    /// the running ones have exited.
    DrainAndReset,
    /// A value that this version does not know.
    Other(u32),
}

impl RecoveryAction {
    /// Returns the action of an NVML number.
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

    /// Returns the action as one CamelCase word.
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
            Self::None => f.write_str("no action"),
            Self::GpuReset => f.write_str("a reset of the GPU (nvidia-smi --gpu-reset)"),
            Self::NodeReboot => f.write_str("a reboot of the node"),
            Self::DrainP2p => f.write_str("termination of all processes that use peer-to-peer"),
            Self::DrainAndReset => {
                f.write_str("a reset of the GPU after its processes have exited")
            }
            Self::Other(number) => write!(f, "recovery action {number} (see nvidia-smi -q)"),
        }
    }
}
