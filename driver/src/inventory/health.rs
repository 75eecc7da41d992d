//! Health of devices as the kubelet reports it.

use std::collections::BTreeMap;

use tessera_api::{
    gpu::{Health, UnpublishedReason},
    names::{DeviceName, GpuUuid, PoolName},
};

use super::HardwareState;
use crate::kubelet::health::DeviceHealth;

/// Returns the health of each GPU that is published whole, and of each device that a claim has.
pub(super) fn health_of(
    state: &HardwareState,
    pool: &PoolName,
    in_use: &BTreeMap<DeviceName, GpuUuid>,
) -> Vec<DeviceHealth> {
    let mut gpus = in_use.clone();
    if let HardwareState::Known(inventory) = state {
        gpus.extend(inventory.shared_gpus().map(|gpu| (gpu.device_name(), gpu.uuid.clone())));
    }
    let health = |(device, gpu): (DeviceName, GpuUuid)| {
        let (healthy, message) = health_of_gpu(state, &gpu);
        DeviceHealth { pool: pool.to_string(), device: device.to_string(), healthy, message }
    };
    gpus.into_iter().map(health).collect()
}

/// Returns whether the GPU is healthy, if that is known, and the reason.
fn health_of_gpu(state: &HardwareState, gpu: &GpuUuid) -> (Option<bool>, String) {
    let inventory = match state {
        HardwareState::Unknown { reason, .. } => return (None, reason.clone()),
        HardwareState::Known(inventory) => inventory,
    };
    if let Some(found) = inventory.gpu(gpu) {
        return match &found.health {
            Health::Healthy => (Some(true), String::new()),
            Health::Unhealthy { message, .. } => (Some(false), message.clone()),
        };
    }
    let known =
        inventory.unpublished.iter().find(|unpublished| unpublished.uuid.as_ref() == Some(gpu));
    match known.map(|known| &known.reason) {
        None => (Some(false), "the GPU is gone".to_owned()),
        Some(reason @ (UnpublishedReason::Lost | UnpublishedReason::Unreadable { .. })) => {
            (Some(false), reason.to_string())
        }
        // It is not published, for a reason that does not depend on its health.
        Some(reason) => (None, reason.to_string()),
    }
}
